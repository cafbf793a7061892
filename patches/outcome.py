"""Seam: `Scheduler.process_batch_result`, after which a step is over and its outcome known.

With overlap scheduling the next step has been launched by now, so nothing is asked of the worker here: what this one
did was written down at its launch.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.observe import per_request
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.patches.barrier import PROCESSED
from sglang_nightjar.patches.hooks import require_applied
from sglang_nightjar.patches.lockstep import free_slots
from sglang_nightjar.policy.base import LEAST_SECONDS, Observation, StepKind

TARGET = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"


def report_outcome(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Around `process_batch_result`: tells the controller what the step did and how long it took, and each request
    what it got, before those that end here are answered."""
    own = controller.current()
    if own is None:
        return original(scheduler, batch, result)
    if batch is PROCESSED:
        return None
    reqs = list(batch.reqs)
    # With overlap a request may have ended, or been retracted, in the step before, when this one was under way.
    done_before = [req.finished() or req.is_retracted for req in reqs] if batch.enable_overlap else [False] * len(reqs)
    is_prefill = batch.forward_mode.is_extend()
    ended_prompts = [req for req in reqs if req.inflight_middle_chunks <= 0] if is_prefill else []
    began_s = own.clock()
    facts, lens = own.flight.awaited(batch.forward_iter).facts, []
    if facts is not None and facts.gamma > 0:
        result.copy_done.synchronize()  # as `original` begins
        lens = result.accept_lens.tolist()
        if facts.drafting:
            drafted = [each and not done for each, done in zip(facts.drafting, done_before, strict=True)]
            per_request.add_step(reqs, drafted, lens)
    answer = original(scheduler, batch, result)
    step, seconds = own.flight.land(batch.forward_iter, began_s, own.clock())
    seconds = max(seconds, LEAST_SECONDS)
    if step.facts is None:
        prompts = int(batch.extend_num_tokens or 0)
        after = _afterwards(own, scheduler)
        seen = Observation(StepKind.PREFILL, 0, step.gamma, (), seconds, prefill_tokens=prompts, **after)
        for req in ended_prompts:
            own.hits.add(len(req.origin_input_ids), req.cached_tokens)
    else:
        seen = _observation(own, scheduler, reqs, done_before, lens, step.facts, seconds)
    own.finished(seen, step)
    return answer


def _afterwards(own: controller.Controller, scheduler: Any) -> dict[str, Any]:
    """What an `Observation` says of the server after the step."""
    return {
        "free_slots": free_slots(scheduler),
        "total_slots": scheduler.max_total_num_tokens,
        "queue_length": len(scheduler.waiting_queue),
        "residency": own.residency,
    }


def _observation(
    own: controller.Controller,
    scheduler: Any,
    reqs: list[Any],
    done_before: list[bool],
    lens: list[int],
    facts: StepFacts,
    seconds: float,
) -> Observation:
    committed = [0] * (facts.gamma + 1)
    cut = cut_tokens = 0
    # A plain step gave each one token.
    for req, was_done, length in zip(reqs, done_before, lens or [1] * len(reqs), strict=True):
        if was_done:  # in the step before, whose outcome was not known when this one was launched: it got nothing
            cut += 1
        elif req.finished():
            cut += 1
            cut_tokens += length
        else:
            committed[length - 1] += 1
    return Observation(
        StepKind.DECODE,
        len(reqs),
        facts.gamma,
        tuple(committed),
        seconds,
        cut=cut,
        cut_tokens=cut_tokens,
        drafted=facts.drafted,
        kv_tokens=facts.kv_tokens,
        catchup_tokens=facts.catchup_tokens,
        catchup_seconds=min(facts.catchup_seconds, seconds),
        draft_seconds=min(facts.draft_seconds, max(seconds - facts.catchup_seconds, 0.0)),
        **_afterwards(own, scheduler),
    )


def install() -> None:
    """Wraps the method."""
    HookRegistry.register(TARGET, report_outcome, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(TARGET)
