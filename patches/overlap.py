"""Seam: `_disable_overlap_schedule_for_cpu`, by which SGLang turns overlap scheduling off where a CPU speculates.

Its own speculation on a CPU cannot do it; ours can. Whether it is to was settled before
(`serving/options.py`), in SGLang's own option.
"""

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_schedule

from sglang_nightjar.config import inherited_config
from sglang_nightjar.patches.hooks import require_applied

TARGET = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"


def leave_as_settled(server_args: Any) -> None:
    """Leaves overlap scheduling as it is (same argument as upstream's function)."""


def install() -> None:
    """Replaces the function."""
    HookRegistry.register(TARGET, leave_as_settled, HookType.REPLACE)


def verify() -> None:
    """Raises `RuntimeError` where the replacement is not in place, or came too late."""
    require_applied(TARGET)
    config = inherited_config()
    if config is not None and config.overlap == "on" and get_schedule().disable_overlap_schedule:
        raise RuntimeError("SGLang has turned overlap scheduling off; its log says why")
