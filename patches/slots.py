"""Seam: `mem_cache.allocation.assign_req_to_token_pool_func`, a Triton kernel upstream."""

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar.platform.slots import assign_req_to_token_pool

TARGET = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"


def install() -> None:
    """Replaces the kernel by its torch twin wherever it was imported."""
    HookRegistry.register(TARGET, assign_req_to_token_pool, HookType.REPLACE)


def verify() -> None:
    """Raises `RuntimeError` where the replacement is not in place."""
    from sglang.srt.mem_cache import allocation

    if not hasattr(allocation.assign_req_to_token_pool_func, "__wrapped__"):
        raise RuntimeError(f"SGLang did not apply the hook on {TARGET}; its log says why")
