"""SGLang's own CUDA platform, with our KV pool and allocator where memory is elastic (entry point
`sglang.srt.platforms`). Untested on a GPU.

It stays in the tree as far as SGLang asks (`_enum` is CUDA): attention, graphs, fused operations and quantization are
what they are without us. Being in the tree also means that SGLang does not ask it for a speculative worker, which
`patches/spec_worker.py` makes up for.
"""

import functools

import torch
from sglang.srt.platforms.cuda import CudaSRTPlatform

from sglang_nightjar import controller
from sglang_nightjar.memory.device_cuda import CudaDevice


class NightjarCudaPlatform(CudaSRTPlatform):
    """What SGLang takes for CUDA in a server whose speculative worker is ours."""

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        own = controller.current()
        if kind != "mha" or own is None or not own.elastic:
            return None
        from sglang_nightjar.memory.elastic_pool_cuda import CudaElasticKVPool

        return CudaElasticKVPool.with_spare(*own.draft_bytes, memory=device_memory())

    def get_paged_allocator_cls(self) -> type | None:
        own = controller.current()
        if own is None or not own.elastic:
            return None
        from sglang_nightjar.memory.elastic_allocator import ElasticPagedAllocator

        return ElasticPagedAllocator


@functools.cache
def device_memory() -> CudaDevice:
    """The GPU this rank serves on: one for weights and pools, since memory goes from one to the other."""
    return CudaDevice(torch.cuda.current_device())
