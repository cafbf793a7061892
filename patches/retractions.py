"""Seam: `ScheduleBatch.retract_decode`, by which running requests lose their KV slots where there are too few."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.patches.hooks import require_applied

TARGET = "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode"


def count_retracted(original: Callable[..., Any], batch: Any) -> Any:
    """Around `retract_decode`: counts the requests that must be prefilled again."""
    answer = original(batch)
    own = controller.current()
    if own is not None:
        own.counters.retracted += len(answer[0])
    return answer


def install() -> None:
    """Wraps the method."""
    HookRegistry.register(TARGET, count_retracted, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(TARGET)
