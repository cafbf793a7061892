"""Seam: how SGLang's launcher starts its processes.

Upstream spawns: every process imports SGLang anew, which is most of a start on a CPU (about 24 s of
CPU time each on two slow cores, and a gigabyte of memory). Ours forks them from the launcher,
which has imported everything and, at that moment, runs a single thread. Not on a GPU, and not
in `Engine`, whose process is the user's and may be anything.
"""

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.entrypoints.engine._set_envs_and_config"


def fork_children(original: Callable[..., Any], server_args: Any) -> Any:
    """Around `_set_envs_and_config`, which sets the start method just before the first process is started."""
    answer = original(server_args)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        logger.warning("processes are spawned, which takes longer: the launcher runs threads (%s)", ", ".join(threads))
        return answer
    # Ctrl-C in a terminal reaches every process, and only the first is to answer it: it ends the others.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    multiprocessing.set_start_method("fork", force=True)
    return answer


def install() -> None:
    """Wraps the function; in the launcher only."""
    HookRegistry.register(TARGET, fork_children, HookType.AROUND)
    HookRegistry.apply_hooks()
