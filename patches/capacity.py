"""Seam: every copy SGLang keeps of how many KV slots there are, told by one function.

They are made once, when the scheduler starts, because upstream's pools never change size.
"""

from typing import Any


def set_capacity(scheduler: Any, slots: int) -> None:
    """The pool of this rank has `slots` slots: admission, checks, statistics and reports follow.

    What a single request may take (`max_req_len`) stays what fits the small pool, so that every request
    admitted while the pool is large still fits when it has shrunk.
    """
    runner = scheduler.tp_worker.model_runner
    if slots > runner.max_total_num_tokens:
        scheduler.running_batch.batch_is_full = False  # it was, for the smaller pool
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
