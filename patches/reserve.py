"""Seam: `get_alloc_reserve_per_decode`, KV slots reserved per request and decode step.

Upstream reserves twice the widest draft, whatever is drafted now. Ours follows the gamma in
force: at gamma 0 one slot, as a server without speculation reserves. Twice that where batches
overlap, since the length committed is then known a step late.
"""

from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_schedule

from sglang_nightjar import controller
from sglang_nightjar.patches.hooks import require_applied

TARGET = "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"


def reserve_for_gamma(original: Callable[[], int]) -> int:
    """Slots to reserve; upstream's bound before serving begins, when pools and rows are sized."""
    own = controller.current()
    if own is None or own.directive.step == 0:
        return original()
    slots = own.reserve()
    return slots if get_schedule().disable_overlap_schedule else 2 * slots


def install() -> None:
    """Wraps the function wherever it was imported."""
    HookRegistry.register(TARGET, reserve_for_gamma, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(TARGET)
