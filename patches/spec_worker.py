"""Seam: `SpeculativeAlgorithm.get_platform_worker_cls`, by which a platform hands out its own speculative worker.

SGLang asks it of platforms out of its tree only, and CUDA is in it. On the CPU platform nothing is to be done.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_nightjar.patches.hooks import require_applied

TARGET = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.get_platform_worker_cls"


def hand_out_ours(original: Callable[[Any], type | None], algorithm: Any) -> type | None:
    """Around `get_platform_worker_cls`: our CUDA worker for STANDALONE."""
    if algorithm is not SpeculativeAlgorithm.STANDALONE:
        return original(algorithm)
    from sglang_nightjar.speculation.cuda_worker import CudaStandaloneWorker

    return CudaStandaloneWorker


def install() -> None:
    """Wraps the method."""
    HookRegistry.register(TARGET, hand_out_ours, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(TARGET)
