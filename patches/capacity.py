"""Seam: every copy SGLang keeps of how many KV slots there are, told by one function.

They are made once, when the scheduler starts, because upstream's pools never change size.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar.memory.elastic_allocator import ElasticAllocator
from sglang_nightjar.patches.hooks import require_applied

CHECK = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_full_pool"


def set_capacity(scheduler: Any, slots: int) -> None:
    """The pool of this rank has `slots` slots: admission, checks, statistics and reports follow.

    What a single request may take (`max_req_len`) stays what fits the small pool, so that every request
    admitted while the pool is large still fits when it has shrunk.
    """
    runner = scheduler.tp_worker.model_runner
    runner.max_total_num_tokens = slots
    for owner in (
        scheduler,
        scheduler.invariant_checker,
        scheduler.pool_stats_observer,
        scheduler.load_inquirer,
        scheduler.kv_events_publisher,
    ):
        assert isinstance(owner.max_total_num_tokens, int), f"{type(owner).__name__} has no capacity of its own"
        object.__setattr__(owner, "max_total_num_tokens", slots)  # some are frozen, for want of a pool that changes
    scheduler.emit_metrics_constants()


def count_withheld(original: Callable[..., Any], checker: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `_check_full_pool`: slots above the ceiling are neither in use nor to be had, so they do not count."""
    allocator = checker.token_to_kv_pool_allocator
    withheld = allocator.withheld() if isinstance(allocator, ElasticAllocator) else 0
    slots = checker.max_total_num_tokens
    object.__setattr__(checker, "max_total_num_tokens", slots - withheld)
    try:
        return original(checker, *args, **kwargs)
    finally:
        object.__setattr__(checker, "max_total_num_tokens", slots)


def install() -> None:
    """Wraps the check."""
    HookRegistry.register(CHECK, count_withheld, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(CHECK)
