"""Seam: `mem_cache.allocation_sizing`, KV slots reserved per request and decode step.

Upstream reserves twice the widest draft, whatever is drafted now. Ours follows the gamma in
force: at gamma 0 one slot, as a server without speculation reserves. With overlap scheduling the
length committed is known a step late, so what that step may have committed, by the gamma it had, comes on
top. The rows of `req_to_token` must have room for the most of both, which upstream's have not beyond gamma 8.
"""

from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.patches.hooks import require_applied

TARGET = "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"
ROWS = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"


def reserve_for_gamma(original: Callable[[], int]) -> int:
    """Slots to reserve; upstream's bound before serving begins, when pools and rows are sized."""
    own = controller.current()
    if own is None or own.directive.step == 0:
        return original()
    return own.reserve()


def rows_for_gamma(original: Callable[[], int]) -> int:
    """Slots of a row beyond the context: for two of the widest steps at its end."""
    own = controller.current()
    return original() if own is None else max(original(), 2 * (own.max_gamma + 1))


def install() -> None:
    """Wraps both functions wherever they were imported."""
    HookRegistry.register(TARGET, reserve_for_gamma, HookType.AROUND)
    HookRegistry.register(ROWS, rows_for_gamma, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where a wrapper is not in place."""
    require_applied(TARGET, ROWS)
