"""Seam: functions of `mem_cache.allocation` that are Triton kernels upstream."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar.patches.hooks import require_applied
from sglang_nightjar.platform.slots import assign_req_to_token_pool, last_slots

MODULE = "sglang.srt.mem_cache.allocation"
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "assign_req_to_token_pool_func": assign_req_to_token_pool,
    "get_last_loc": last_slots,
}


def install() -> None:
    """Replaces the kernels by their torch twins wherever they were imported."""
    for name, replacement in REPLACEMENTS.items():
        HookRegistry.register(f"{MODULE}.{name}", replacement, HookType.REPLACE)


def verify() -> None:
    """Raises `RuntimeError` where a replacement is not in place."""
    require_applied(*(f"{MODULE}.{name}" for name in REPLACEMENTS))
