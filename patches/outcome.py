"""Seam: `Scheduler.process_batch_result`, after which a step is over and its outcome known."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar import controller
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.patches.hooks import require_applied
from sglang_nightjar.patches.lockstep import free_slots
from sglang_nightjar.policy.base import LEAST_SECONDS, Observation, StepKind

TARGET = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"

_ended_s: list[float] = []  # when the step before ended


def report_outcome(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Around `process_batch_result`: tells the controller what the step did and how long it took."""
    own = controller.current()
    if own is None:
        return original(scheduler, batch, result)
    decode = batch.forward_mode.is_decode()
    reqs = list(batch.reqs)
    done_before = [req.finished() or req.is_retracted for req in reqs]
    lens = result.accept_lens.tolist() if decode else []
    answer = original(scheduler, batch, result)
    now = own.clock()
    began = batch.launch_ts if batch.after_idle_gap or not _ended_s else _ended_s[0]
    _ended_s[:] = [now]
    seconds = max(now - began, LEAST_SECONDS)
    if not decode:
        seen = Observation(
            StepKind.PREFILL, 0, own.gamma, (), seconds, prefill_tokens=int(batch.extend_num_tokens or 0)
        )
        for req in reqs:
            if req is not scheduler.chunked_req:
                own.hits.add(len(req.origin_input_ids), req.cached_tokens)
        own.finished(seen, None)
        return answer
    facts = own.worker.last_step
    own.finished(_observation(own, scheduler, reqs, done_before, lens, facts, seconds), facts)
    return answer


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
    for req, was_done, length in zip(reqs, done_before, lens, strict=True):
        if req.finished() or was_done:
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
        kv_tokens=sum(req.kv.kv_committed_len for req in reqs if req.kv is not None),
        free_slots=free_slots(scheduler),
        total_slots=scheduler.max_total_num_tokens,
        queue_length=len(scheduler.waiting_queue),
        residency=own.residency,
        catchup_tokens=facts.catchup_tokens,
        catchup_seconds=min(facts.catchup_seconds, seconds),
    )


def install() -> None:
    """Wraps the method."""
    HookRegistry.register(TARGET, report_outcome, HookType.AROUND)


def verify() -> None:
    """Raises `RuntimeError` where the wrapper is not in place."""
    require_applied(TARGET)
