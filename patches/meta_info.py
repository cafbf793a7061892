"""Seam: `SchedulerOutputStreamer.build_additional_customized_info`, upstream's own place for more `meta_info`.

A finished request's `meta_info` gets `nightjar`, a list of one entry (upstream's form for such fields).
"""

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.patches.hooks import require_applied

TARGET = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.build_additional_customized_info"
)
logger = logging.getLogger(__name__)


def add_story(original: Callable[..., dict[str, Any]], streamer: Any, reqs: list[Any]) -> dict[str, Any]:
    """Adds a `nightjar` entry for each of `reqs`, empty until it has finished."""
    info = original(streamer, reqs)
    own = controller.current()
    if own is not None and any(req.finished() for req in reqs):
        info["nightjar"] = [[own.story_of(req)] if req.finished() else [] for req in reqs]
    return info


def install() -> None:
    """Wraps the method and opts in, but where upstream's Rust front would refuse to start for it."""
    if envs.SGLANG_RUST_SERVER.get():
        logger.warning("meta_info has no nightjar entry with SGLANG_RUST_SERVER=1, which carries no such fields")
        return
    SchedulerOutputStreamer.has_additional_customized_info = True
    HookRegistry.register(TARGET, add_story, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    if not envs.SGLANG_RUST_SERVER.get():
        require_applied(TARGET)
