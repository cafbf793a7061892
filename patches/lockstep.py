"""Seam: the broadcast of requests that opens every scheduler iteration, which all ranks receive in lockstep.

Rank 0 decides before it receives, its directive rides the broadcast, and every rank puts it in
force before it builds its batch (`Scheduler.ingest_requests`, `SchedulerRequestReceiver`).
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.coordination.messages import is_directive
from sglang_nightjar.patches.hooks import require_applied
from sglang_nightjar.policy.base import State

INGEST = "sglang.srt.managers.scheduler.Scheduler.ingest_requests"
BROADCAST = (
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks"
)

_pending: list[bytes] = []  # what rank 0 has decided and not yet broadcast
_scheduler: list[Any] = []  # of this process


def scheduler_of_rank() -> Any:
    """The scheduler of this process, once it has begun to serve."""
    return _scheduler[0]


def decide_first(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ingest_requests`: rank 0 decides gamma for the batch it is about to decode."""
    own = controller.current()
    if own is not None:
        _scheduler[:] = [scheduler]
        batches = decoding_batches(scheduler)
        size = sum(len(batch.reqs) for batch in batches)
        own.poll(idle=size == 0 and not scheduler.waiting_queue and scheduler.chunked_req is None)
        if not _pending and own.wants_decision(size):
            _pending.append(own.propose(server_state(scheduler, batches, own) if size else None))
    return original(scheduler, *args, **kwargs)


def carry_directive(original: Callable[..., Any], receiver: Any, recv_reqs: Any, local_reqs: Any = None) -> Any:
    """Around `_broadcast_reqs_across_ranks`: adds rank 0's directive, and takes it out again on every rank."""
    own = controller.current()
    if own is None:
        return original(receiver, recv_reqs, local_reqs)
    if _pending and recv_reqs is not None:
        recv_reqs = [*recv_reqs, _pending.pop()]
    received = original(receiver, recv_reqs, local_reqs)
    for item in received or ():
        if is_directive(item):
            own.apply(item)
    return [item for item in received or () if not is_directive(item)]


def decoding_batches(scheduler: Any) -> list[Any]:
    """The batches whose requests decode next: those that run, and those whose prefill has just ended."""
    running, last = scheduler.running_batch, scheduler.last_batch
    batches = [] if running is None or running.is_empty() else [running]
    if last is not None and last is not running and last.forward_mode.is_extend() and not last.is_empty():
        batches.append(last)
    return batches


def server_state(scheduler: Any, batches: list[Any], own: controller.Controller) -> State:
    """What the planner sees of the server now."""
    reqs = [req for batch in batches for req in batch.reqs]
    waiting = len(scheduler.waiting_queue)
    return State(
        now_s=own.clock(),
        batch_size=len(reqs),
        kv_tokens=sum(req.kv.kv_committed_len for req in reqs),
        free_slots=free_slots(scheduler),
        total_slots=scheduler.max_total_num_tokens,
        queue_length=waiting,
        queue_blocked=bool(
            waiting and scheduler.running_batch.batch_is_full and len(reqs) < scheduler.max_running_requests
        ),
        max_lag=max((own.worker.max_lag(batch) for batch in batches), default=0),
        residency=own.residency,
    )


def free_slots(scheduler: Any) -> int:
    """KV slots a new token could take: free ones, and cached ones that nobody holds."""
    free: int = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return free


def install() -> None:
    """Wraps both methods."""
    HookRegistry.register(INGEST, decide_first, HookType.AROUND)
    HookRegistry.register(BROADCAST, carry_directive, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where a wrapper is not in place."""
    require_applied(INGEST, BROADCAST)
