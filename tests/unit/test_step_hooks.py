"""The hooks around a scheduler iteration, with a scheduler made of plain objects."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_nightjar import controller as module
from sglang_nightjar.controller import Controller
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.patches import lockstep, outcome, reserve
from sglang_nightjar.policy.base import Observation, StepKind
from sglang_nightjar.policy.baselines.random_switch import RandomSwitch
from sglang_nightjar.policy.planner import Planner


class Recorder(RandomSwitch):
    """Remembers what it has seen."""

    def __init__(self) -> None:
        super().__init__(5, seed=2, longest=1)
        self.seen: list[Observation] = []

    def observe(self, seen: Observation) -> None:
        super().observe(seen)
        self.seen.append(seen)


class Mode:
    def __init__(self, extend: bool) -> None:
        self.extend = extend

    def is_extend(self) -> bool:
        return self.extend

    def is_decode(self) -> bool:
        return not self.extend


def request(tokens: int, done: bool = False) -> Any:
    return SimpleNamespace(
        kv=SimpleNamespace(kv_committed_len=tokens),
        finished=lambda: done,
        is_retracted=False,
        origin_input_ids=[0] * tokens,
        cached_tokens=tokens // 4,
    )


def batch(*reqs: Any, extend: bool = False, idle_before: bool = False) -> Any:
    return SimpleNamespace(
        reqs=list(reqs),
        forward_mode=Mode(extend),
        is_empty=lambda: not reqs,
        batch_is_full=False,
        launch_ts=100.0,
        after_idle_gap=idle_before,
        extend_num_tokens=7 if extend else None,
    )


def scheduler(running: Any, last: Any = None) -> Any:
    return SimpleNamespace(
        running_batch=running,
        last_batch=last,
        waiting_queue=[1, 2],
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 50),
        tree_cache=SimpleNamespace(evictable_size=lambda: 25),
        max_total_num_tokens=1000,
        max_running_requests=8,
        chunked_req=None,
    )


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    made = Controller(Planner(Recorder()), 5, 3, catchup_budget_s=0.1, clock=lambda: 103.0)
    made.worker = SimpleNamespace(max_lag=lambda batch: len(batch.reqs), draft_forwards=0, last_step=StepFacts(0))
    monkeypatch.setattr(module, "_current", made)
    monkeypatch.setattr(lockstep, "_pending", [])
    monkeypatch.setattr(outcome, "_ended_s", [])
    yield made


def test_state_counts_the_running_and_those_just_prefilled(own: Controller) -> None:
    running, last = batch(request(10), request(20)), batch(request(5), extend=True)
    batches = lockstep.decoding_batches(scheduler(running, last))
    state = lockstep.server_state(scheduler(running, last), batches, own)
    assert (state.batch_size, state.kv_tokens, state.max_lag) == (3, 35, 2)
    assert (state.free_slots, state.total_slots, state.queue_length) == (75, 1000, 2)
    assert not state.queue_blocked
    running.batch_is_full = True
    assert lockstep.server_state(scheduler(running, last), batches, own).queue_blocked


def test_directive_rides_the_broadcast_and_leaves_it_again(own: Controller) -> None:
    one = scheduler(batch(request(10)))
    received: list[list[Any]] = []

    def broadcast(receiver: Any, reqs: Any, local_reqs: Any) -> Any:
        received.append(reqs)
        return reqs

    def ingest(_: Any) -> Any:
        return lockstep.carry_directive(broadcast, None, ["request"])

    assert lockstep.decide_first(ingest, one) == ["request"]
    assert len(received[0]) == 2 and own.directive.step == 1
    lockstep.decide_first(ingest, one)
    assert received[1] == ["request"], "the decision has not been used yet"


def test_without_a_controller_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_current", None)
    reqs = ["request"]
    assert lockstep.carry_directive(lambda receiver, reqs, local: reqs, None, reqs) is reqs
    assert outcome.report_outcome(lambda s, b, r: "answer", None, None, None) == "answer"
    assert reserve.reserve_for_gamma(lambda: 12) == 12


def test_outcome_of_a_decode_step(own: Controller) -> None:
    """Three requests committed 4, 1 and 2 tokens; the last one ended. The step lasted since the launch."""
    policy = own.planner.policy  # type: ignore[union-attr]
    own.worker.last_step = StepFacts(3, drafted=2, tokens=6, rejected=1)
    done = batch(request(10), request(20), request(30, done=True), idle_before=True)
    result = SimpleNamespace(accept_lens=torch.tensor([4, 1, 2]))
    assert outcome.report_outcome(lambda s, b, r: "answer", scheduler(done), done, result) == "answer"
    [seen] = policy.seen
    assert (seen.kind, seen.batch_size, seen.gamma, seen.committed) == (StepKind.DECODE, 3, 3, (1, 0, 0, 1))
    assert (seen.cut, seen.cut_tokens, seen.drafted, seen.seconds) == (1, 2, 2, 3.0)
    assert seen.tokens == 7


def test_a_step_begins_where_the_last_one_ended(own: Controller) -> None:
    policy = own.planner.policy  # type: ignore[union-attr]
    prompt = batch(request(7), extend=True, idle_before=True)
    outcome.report_outcome(lambda s, b, r: None, scheduler(prompt), prompt, None)
    own.clock = lambda: 103.5
    own.worker.last_step = StepFacts(0)
    running = batch(request(8))
    result = SimpleNamespace(accept_lens=torch.tensor([1]))
    outcome.report_outcome(lambda s, b, r: None, scheduler(running), running, result)
    assert [(seen.kind, seen.seconds) for seen in policy.seen] == [(StepKind.PREFILL, 3.0), (StepKind.DECODE, 0.5)]
    assert policy.seen[0].prefill_tokens == 7


def test_the_hit_rate_counts_prompts_whose_prefill_is_over(own: Controller) -> None:
    done, chunked = request(80), request(400)
    prompt = batch(done, chunked, extend=True)
    server = scheduler(prompt)
    server.chunked_req = chunked
    outcome.report_outcome(lambda s, b, r: None, server, prompt, None)
    assert own.hits.value == 0.25 and own.hits.tokens == 80


@pytest.mark.parametrize("overlap", [False, True])
def test_slots_reserved_follow_gamma(own: Controller, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a step writes: at gamma 0 the one of a server without speculation."""
    monkeypatch.setattr(reserve, "get_schedule", lambda: SimpleNamespace(disable_overlap_schedule=not overlap))
    assert reserve.reserve_for_gamma(lambda: 12) == 12, "before serving: upstream's bound, for sizing pools"
    for _ in range(30):
        own.apply(own.propose(lockstep.server_state(scheduler(batch(request(3))), [batch(request(3))], own)))
        assert reserve.reserve_for_gamma(lambda: 12) == (own.gamma + 1) * (2 if overlap else 1)
