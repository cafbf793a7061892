"""The elastic pool of a GPU. Untested on one: what differs from the host's is read from SGLang's source."""

import torch
from sglang.srt.mem_cache.memory_pool import _set_kv_buffer_impl

from sglang_nightjar.errors import UserError
from sglang_nightjar.memory.elastic_pool import ElasticBuffers


class CudaElasticKVPool(ElasticBuffers):
    """K and V in CUDA virtual memory. Made by `with_spare`, which names the device."""

    def _create_buffers(self) -> None:
        for asked, instead in (
            (self.post_capture_active, "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
            (self.is_quantized_kv_cache, "leave out --kv-cache-dtype"),
            (self.use_hnd, "unset SGLANG_USE_HND_KVCACHE"),
        ):
            if asked:
                raise UserError(f"elastic memory cannot hold this KV cache: {instead}, or set --nightjar-elastic off")
        super()._create_buffers()

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """As upstream, but bounded by the buffers' rows and not by the pool's present size.

        The bound is an argument of the kernel that stores K and V, which asserts it on the device, and a captured graph
        keeps the one it was captured with: a graph from before the pool grew would end the process at the first
        token stored in a new slot. Where a slot that has no memory is named, the device still faults.
        """
        keys, values = self.k_buffer[layer_idx], self.v_buffer[layer_idx]
        _set_kv_buffer_impl(
            cache_k,
            cache_v,
            keys,
            values,
            loc,
            row_dim=self.row_dim,
            size_limit=len(keys),
            alt_stream=self.alt_stream,
            v_row_dim=self.v_row_dim,
            store_dtype=self.store_dtype,
            device_module=self.device_module,
        )
