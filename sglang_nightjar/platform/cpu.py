"""The SGLang platform of a machine without a GPU (entry point `sglang.srt.platforms`)."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_nightjar import controller
from sglang_nightjar.platform.names import ATTENTION_BACKEND, PLATFORM


class NightjarCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Real float32 serving on CPU: numba attention, prepacked linears, chain speculation.

    Being out of tree makes SGLang dispatch every fused operation to ours where there is one
    (`fused_ops.py`), else to its plain torch form, so nothing of its own CPU engine is needed.
    """

    _enum = PlatformEnum.OOT
    device_name = PLATFORM
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "STANDALONE"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm == "STANDALONE" and backend == ATTENTION_BACKEND

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        if algorithm != "STANDALONE":
            return None
        from sglang_nightjar.speculation.worker import NightjarStandaloneWorker

        return NightjarStandaloneWorker

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sglang_nightjar.platform.slots import extend_cache_locs

        return extend_cache_locs

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        own = controller.current()
        if own is None or not own.elastic:
            from sglang_nightjar.platform.kv_pool import CpuKVPool

            return CpuKVPool
        from sglang_nightjar.memory.elastic_pool import ElasticKVPool

        return ElasticKVPool.with_spare(*own.draft_bytes)

    def get_paged_allocator_cls(self) -> type | None:
        own = controller.current()
        if own is None or not own.elastic:
            return None
        from sglang_nightjar.memory.elastic_allocator import ElasticPagedAllocator

        return ElasticPagedAllocator

    def get_quantization_config(self, quantization: str) -> type | None:
        from sglang_nightjar.platform.quantization import QUANTIZATION_METHODS

        return QUANTIZATION_METHODS.get(quantization)

    def get_dispatch_key_name(self) -> str:
        from sglang_nightjar.platform.fused_ops import DISPATCH_KEY

        return DISPATCH_KEY

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Runs when a rank's process loads its model runner."""
        from sglang_nightjar.platform.threads import apply_thread_limits

        apply_thread_limits()
        from sglang_nightjar.platform.fused_ops import register_fused_ops

        register_fused_ops()

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang_nightjar.platform.linear import prepack_linears

        prepack_linears(model)
