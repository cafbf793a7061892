"""The KV pool of the CPU platform: SGLang's, without its Triton copy kernel."""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native


class CpuKVPool(MHATokenToKVPool):
    """K and V buffers, one row per KV slot (upstream seam: `SRTPlatform.get_kv_pool_cls`)."""

    def _init_kv_copy_and_warmup(self) -> None:
        """No kernel to prepare: slots move by plain indexing."""

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)
