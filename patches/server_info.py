"""Seam: the speculative part of `/server_info`'s internal state."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.emulate import device as emulated
from sglang_nightjar.patches.hooks import require_applied

TARGET = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative"


def add_nightjar(original: Callable[..., None], state_controller: Any, state: dict[str, Any]) -> None:
    """Adds a `nightjar` entry to `state`."""
    original(state_controller, state)
    own = controller.current()
    if own is not None:
        state["nightjar"] = own.report()
    device = emulated.current()
    if device is not None:
        state["emulated"] = device.report()


def install() -> None:
    """Wraps the method."""
    HookRegistry.register(TARGET, add_nightjar, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(TARGET)
