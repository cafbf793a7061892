"""Seam: the broadcast of requests that opens every scheduler iteration, which all ranks receive in lockstep.

Rank 0 decides between receiving and broadcasting, its directive rides the broadcast, and every rank puts
it in force before it builds its batch (`Scheduler.ingest_requests`, `SchedulerRequestReceiver`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.coordination.messages import is_directive
from sglang_nightjar.patches.hooks import require_applied
from sglang_nightjar.policy.base import State

INGEST = "sglang.srt.managers.scheduler.Scheduler.ingest_requests"
BROADCAST = (
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks"
)

_scheduler: list[Any] = []  # of this process


def scheduler_of_rank() -> Any:
    """The scheduler of this process, once it has begun to serve."""
    return _scheduler[0]


def go_on(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ingest_requests`: what moves in the background goes on."""
    own = controller.current()
    if own is not None:
        _scheduler[:] = [scheduler]
        idle = not decoding_batches(scheduler) and not scheduler.waiting_queue and scheduler.chunked_req is None
        own.poll(idle=idle)
    return original(scheduler, *args, **kwargs)


def carry_directive(original: Callable[..., Any], receiver: Any, recv_reqs: Any, local_reqs: Any = None) -> Any:
    """Around `_broadcast_reqs_across_ranks`: rank 0 decides for the batch it is about to run, which what it has
    just received may join; its directive goes along, and is taken out again and put in force on every rank."""
    own = controller.current()
    if own is None:
        return original(receiver, recv_reqs, local_reqs)
    if own.planner is not None and recv_reqs is not None:
        own.counters.arrived += sum(1 for _ in _requests(recv_reqs))
        directive = decide(own, scheduler_of_rank(), recv_reqs)
        if directive is not None:
            recv_reqs = [*recv_reqs, directive]
    received = original(receiver, recv_reqs, local_reqs)
    for item in received or ():
        if is_directive(item):
            own.apply(item)
    return [item for item in received or () if not is_directive(item)]


def decide(own: controller.Controller, scheduler: Any, received: Sequence[Any]) -> bytes | None:
    """Rank 0's next directive, where one is due."""
    batches = decoding_batches(scheduler)
    size = sum(len(batch.reqs) for batch in batches)
    joining, prompt_tokens = about_to_join(scheduler, batches, received) if own.judges_prompts else (0, 0)
    if not own.wants_decision(size, joining):
        return None
    now = server_state(scheduler, batches, own)
    after = replace(now, batch_size=size + joining, kv_tokens=now.kv_tokens + prompt_tokens) if joining else None
    return own.propose(now if size else None, after)


def decoding_batches(scheduler: Any) -> list[Any]:
    """The batches whose requests decode next: those that run, and those whose prefill has just ended."""
    running, last = scheduler.running_batch, scheduler.last_batch
    batches = [] if running is None or running.is_empty() else [running]
    if last is not None and last is not running and last.forward_mode.is_extend() and not last.is_empty():
        batches.append(last)
    return batches


def server_state(scheduler: Any, batches: list[Any], own: controller.Controller) -> State:
    """What the planner sees of the server now."""
    running = sum(len(batch.reqs) for batch in batches)
    looks = [own.worker.look(batch) for batch in batches]
    waiting = len(scheduler.waiting_queue)
    return State(
        now_s=own.clock(),
        batch_size=running,
        kv_tokens=sum(tokens for _, tokens in looks),
        free_slots=free_slots(scheduler),
        total_slots=scheduler.max_total_num_tokens,
        queue_length=waiting,
        queue_blocked=bool(
            waiting and scheduler.running_batch.batch_is_full and running < scheduler.max_running_requests
        ),
        max_lag=max((lag for lag, _ in looks), default=0),
        residency=own.residency,
    )


def about_to_join(scheduler: Any, batches: list[Any], received: Sequence[Any]) -> tuple[int, int]:
    """How many requests the coming prefills will about let in, and their prompt tokens.

    Counts as SGLang's admission does (`PrefillAdder`): prompts, and the share of further tokens that it
    expects, have to fit beside what those that run may still need.
    """
    if scheduler.running_batch.batch_is_full or next(_waiting(scheduler, received), None) is None:
        return 0, 0
    ratio = scheduler.new_token_ratio_tracker.current
    running = [req for batch in batches for req in batch.reqs]
    room = free_slots(scheduler) - sum(
        ratio * max(_expected(req.sampling_params) - len(req.output_ids), 0) for req in running
    )
    count = tokens = 0
    for length, sampling in _waiting(scheduler, received):
        room -= length + ratio * _expected(sampling)
        if room < 0 or len(running) + count >= scheduler.max_running_requests:
            break
        count, tokens = count + 1, tokens + length
    return count, tokens


def _waiting(scheduler: Any, received: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Prompt length and sampling parameters of each request that waits or has just come, in order; made one by one,
    since a long queue is not looked at beyond what fits."""
    for req in scheduler.waiting_queue:
        yield len(req.origin_input_ids), req.sampling_params
    for req in _requests(received):
        yield len(req.input_ids or ()), req.sampling_params


def _requests(received: Sequence[Any]) -> Iterator[Any]:
    """What of it are requests to generate, those of a batch one by one."""
    for item in received:
        for each in item.batch if isinstance(item, BatchTokenizedGenerateReqInput) else [item]:
            if isinstance(each, TokenizedGenerateReqInput):
                yield each


def _expected(sampling: Any) -> int:
    """Most output tokens admission expects of a request; one without a limit has not been given its own yet."""
    limit = sampling.max_new_tokens
    return CLIP_MAX_NEW_TOKENS if limit is None else min(limit, CLIP_MAX_NEW_TOKENS)


def free_slots(scheduler: Any) -> int:
    """KV slots a new token could take: free ones, and cached ones that nobody holds."""
    free: int = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return free


def install() -> None:
    """Wraps both methods."""
    HookRegistry.register(INGEST, go_on, HookType.AROUND)
    HookRegistry.register(BROADCAST, carry_directive, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where a wrapper is not in place."""
    require_applied(INGEST, BROADCAST)
