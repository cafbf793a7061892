"""The hooks around a scheduler iteration, with a scheduler made of plain objects."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput

from sglang_nightjar import controller as module
from sglang_nightjar.controller import Controller
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.patches import lockstep, outcome, reserve
from sglang_nightjar.policy.base import Observation, Residency, StepKind
from sglang_nightjar.policy.baselines.fixed import Fixed
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
        inflight_middle_chunks=0,
    )


def batch(*reqs: Any, extend: bool = False, idle_before: bool = False, number: int = 1, overlap: bool = False) -> Any:
    return SimpleNamespace(
        reqs=list(reqs),
        enable_overlap=overlap,
        seq_lens=torch.tensor([req.kv.kv_committed_len for req in reqs]),
        forward_mode=Mode(extend),
        is_empty=lambda: not reqs,
        batch_is_full=False,
        forward_iter=number,
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
    made.worker = SimpleNamespace(look=lambda batch: (len(batch.reqs), int(batch.seq_lens.sum())), draft_forwards=0)
    monkeypatch.setattr(module, "_current", made)
    yield made


def launch(own: Controller, launched: Any, facts: StepFacts | None) -> None:
    """What the worker tells at the end of a launch."""
    began_s = launched.launch_ts * own.speed
    own.launched(launched.forward_iter, facts, began_s=began_s, after_idle=launched.after_idle_gap)


def result_of(*lens: int) -> Any:
    """Of a decode step that committed so many tokens of each request."""
    return SimpleNamespace(accept_lens=torch.tensor(lens), copy_done=SimpleNamespace(synchronize=lambda: None))


def finish(own: Controller, seen: Observation, facts: StepFacts | None) -> None:
    """One step, its outcome processed before anything else happens."""
    own.launched(1, facts, began_s=own.clock(), after_idle=True)
    step, _ = own.flight.land(1, own.clock(), own.clock())
    own.finished(seen, step)


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
    one.waiting_queue = []
    received: list[list[Any]] = []

    def broadcast(receiver: Any, reqs: Any, local_reqs: Any) -> Any:
        received.append(reqs)
        return reqs

    def ingest(_: Any) -> Any:
        return lockstep.carry_directive(broadcast, None, ["request"])

    assert lockstep.go_on(ingest, one) == ["request"]
    assert len(received[0]) == 2 and own.directive.step == 1
    lockstep.go_on(ingest, one)
    assert received[1] == ["request"], "the decision has not been used yet"


def arriving(prompt: int, most: int | None = 40) -> TokenizedGenerateReqInput:
    return message(
        TokenizedGenerateReqInput, input_ids=[1] * prompt, sampling_params=SimpleNamespace(max_new_tokens=most)
    )


def message(kind: Any, **known: Any) -> Any:
    """A message of SGLang's with only the `known` fields filled in."""
    fields = msgspec.structs.fields(kind)
    return kind(**{field.name: known.get(field.name) for field in fields if field.required or field.name in known})


def test_requests_about_to_join_are_those_that_fit() -> None:
    """75 slots are free; half of the tokens a request may still write are expected of it."""
    running = batch(request(10))  # 20 of 60 tokens to come: 20 slots
    running.reqs[0].output_ids, running.reqs[0].sampling_params = [0] * 20, SimpleNamespace(max_new_tokens=60)
    server = scheduler(running)
    waiting = SimpleNamespace(origin_input_ids=[1] * 9, sampling_params=SimpleNamespace(max_new_tokens=10))
    server.waiting_queue, server.new_token_ratio_tracker = [waiting], SimpleNamespace(current=0.5)
    count = partial(lockstep.about_to_join, server, [running])
    assert count([]) == (1, 9)
    assert count([arriving(11), "another message"]) == (2, 20)
    assert count([arriving(11), arriving(1)]) == (2, 20), "31 slots for the second, 10 left for the third"
    group = message(BatchTokenizedGenerateReqInput, batch=[arriving(5), arriving(5, None)])
    assert count([group]) == (2, 14), "one without a limit may write thousands"
    server.max_running_requests = 2
    assert count([arriving(1, 1), arriving(1, 1)]) == (1, 9)
    running.batch_is_full = True
    assert count([arriving(1)]) == (0, 0)


@pytest.mark.parametrize("reads", [True, False])
def test_a_prompt_that_ends_speculation_is_not_read_by_the_draft(own: Controller, reads: bool) -> None:
    asked: list[Any] = []
    policy: Any = Fixed(2, 5)
    policy.reads_prompts = lambda state: asked.append(state) or reads
    own.planner = Planner(policy)
    server = scheduler(batch(request(10)))
    server.waiting_queue, server.new_token_ratio_tracker = [], SimpleNamespace(current=0.5)
    for req in server.running_batch.reqs:
        req.output_ids, req.sampling_params = [], SimpleNamespace(max_new_tokens=8)
    own.apply(lockstep.decide(own, server, []) or b"")
    assert own.reads_prompts and not asked, "nobody is about to join"
    assert lockstep.decide(own, server, []) is None
    own.apply(lockstep.decide(own, server, [arriving(12)]) or b"")
    assert (asked[0].batch_size, asked[0].kv_tokens) == (2, 22)
    assert own.gamma > 0 and own.reads_prompts is reads
    assert lockstep.decide(own, server, [arriving(12)]) is None, "the answer is known"


def test_no_gamma_is_chosen_for_a_batch_that_prefills_first(own: Controller) -> None:
    asked: list[Any] = []
    policy: Any = SimpleNamespace(
        decide=lambda state: asked.append(state) or 4,
        verify_budget=lambda: None,
        observe=lambda seen: None,
        reads_prompts=lambda state: False,
    )
    own.planner = Planner(policy)
    server = scheduler(batch(request(10)))
    server.waiting_queue, server.new_token_ratio_tracker = [], SimpleNamespace(current=0.5)
    for req in server.running_batch.reqs:
        req.output_ids, req.sampling_params = [], SimpleNamespace(max_new_tokens=8)
    own.apply(lockstep.decide(own, server, [arriving(12)]) or b"")
    assert not asked and own.gamma == 3, "the gamma of the start stays"
    # Admission was not of our opinion: a decode step came.
    finish(own, Observation(StepKind.DECODE, 1, 3, (1,), 0.1), StepFacts(3))
    own.apply(lockstep.decide(own, server, [arriving(12)]) or b"")
    assert [state.batch_size for state in asked] == [1] and own.gamma == 4
    finish(own, Observation(StepKind.PREFILL, 0, 0, (), 0.1, prefill_tokens=12), None)
    own.apply(lockstep.decide(own, server, [arriving(12), arriving(1)]) or b"")
    assert len(asked) == 1, "it admits again"


def test_without_a_controller_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_current", None)
    reqs = ["request"]
    assert lockstep.carry_directive(lambda receiver, reqs, local: reqs, None, reqs) is reqs
    assert outcome.report_outcome(lambda s, b, r: "answer", None, None, None) == "answer"
    assert reserve.reserve_for_gamma(lambda: 12) == 12


def test_outcome_of_a_decode_step(own: Controller) -> None:
    """Three requests committed 4, 1 and 2 tokens; the last one ended. The step lasted since the launch."""
    policy = own.planner.policy  # type: ignore[union-attr]
    ending = request(30)
    done = batch(request(10), request(20), ending, idle_before=True)
    launch(own, done, StepFacts(3, drafted=2, tokens=6, rejected=1))
    result = result_of(4, 1, 2)

    def process(*_: Any) -> str:
        ending.finished = lambda: True
        return "answer"

    assert outcome.report_outcome(process, scheduler(done), done, result) == "answer"
    [seen] = policy.seen
    assert (seen.kind, seen.batch_size, seen.gamma, seen.committed) == (StepKind.DECODE, 3, 3, (1, 0, 0, 1))
    assert (seen.cut, seen.cut_tokens, seen.drafted, seen.seconds) == (1, 2, 2, 3.0)
    assert seen.tokens == 7


def test_a_step_after_idling_is_measured_in_emulated_seconds(own: Controller) -> None:
    own.speed, own.clock = 0.5, lambda: 51.5  # the launch was at 100 s of real time
    done = batch(request(10), idle_before=True)
    launch(own, done, StepFacts(0, kv_tokens=9))
    outcome.report_outcome(lambda s, b, r: None, scheduler(done), done, result_of(1))
    assert own.planner.policy.seen[0].seconds == 1.5  # type: ignore[union-attr]
    assert own.planner.policy.seen[0].kv_tokens == 9  # type: ignore[union-attr]


def test_a_request_that_had_ended_before_gets_nothing(own: Controller) -> None:
    """With overlap a step may be launched before the end of a request is known: it takes its time, that is all."""
    done = batch(request(10), request(30, done=True), idle_before=True, overlap=True)
    launch(own, done, StepFacts(2, drafted=2, tokens=6))
    outcome.report_outcome(lambda s, b, r: None, scheduler(done), done, result_of(3, 3))
    [seen] = own.planner.policy.seen  # type: ignore[union-attr]
    assert (seen.batch_size, seen.committed, seen.cut, seen.cut_tokens, seen.tokens) == (2, (0, 0, 1), 1, 0, 3)


def test_a_step_begins_where_the_last_one_ended(own: Controller) -> None:
    policy = own.planner.policy  # type: ignore[union-attr]
    prompt = batch(request(7), extend=True, idle_before=True)
    launch(own, prompt, None)
    outcome.report_outcome(lambda s, b, r: None, scheduler(prompt), prompt, None)
    own.clock = lambda: 103.5
    running = batch(request(8), number=2)
    launch(own, running, StepFacts(0))
    outcome.report_outcome(lambda s, b, r: None, scheduler(running), running, result_of(1))
    assert [(seen.kind, seen.seconds) for seen in policy.seen] == [(StepKind.PREFILL, 3.0), (StepKind.DECODE, 0.5)]
    assert policy.seen[0].prefill_tokens == 7


@pytest.mark.parametrize("overlap", [True, False])
def test_of_a_plain_step_nothing_is_read(own: Controller, overlap: bool) -> None:
    """Each request got one token; with overlap, one that had ended before got none."""
    ending, ended = request(30), request(30, done=overlap)
    done = batch(request(10), ended, ending, idle_before=True, overlap=overlap)
    launch(own, done, StepFacts(0))

    def process(*_: Any) -> None:
        ending.finished = lambda: True

    outcome.report_outcome(process, scheduler(done), done, SimpleNamespace(copy_done=None))
    [seen] = own.planner.policy.seen  # type: ignore[union-attr]
    assert (seen.committed, seen.cut, seen.cut_tokens) == (((1,), 2, 1) if overlap else ((2,), 1, 1))


@pytest.mark.parametrize("extend", [True, False])
def test_an_outcome_says_how_the_server_is_afterwards(own: Controller, extend: bool) -> None:
    step = batch(request(7), extend=extend)
    launch(own, step, None if extend else StepFacts(0))
    own.memory = SimpleNamespace(residency=Residency.EVICTED)  # type: ignore[assignment]
    outcome.report_outcome(lambda s, b, r: None, scheduler(step), step, None if extend else result_of(1))
    (seen,) = own.planner.policy.seen  # type: ignore[union-attr]
    assert seen.residency is Residency.EVICTED and seen.total_slots > 0


def test_the_hit_rate_counts_prompts_whose_prefill_is_over(own: Controller) -> None:
    done, chunked = request(80), request(400)
    chunked.inflight_middle_chunks = 1
    prompt = batch(done, chunked, extend=True)

    def process(*_: Any) -> None:
        chunked.inflight_middle_chunks = 0

    launch(own, prompt, None)
    outcome.report_outcome(process, scheduler(prompt), prompt, None)
    assert own.hits.value == 0.25 and own.hits.tokens == 80


def test_slots_reserved_follow_gamma(own: Controller) -> None:
    """As many as a step writes: at gamma 0 the one of a server without speculation."""
    assert reserve.reserve_for_gamma(lambda: 12) == 12, "before serving: upstream's bound, for sizing pools"
    assert (reserve.rows_for_gamma(lambda: 10), reserve.rows_for_gamma(lambda: 30)) == (12, 30)
    for _ in range(30):
        own.apply(own.propose(lockstep.server_state(scheduler(batch(request(3))), [batch(request(3))], own)))
        assert reserve.reserve_for_gamma(lambda: 12) == own.gamma + 1


def test_a_thousand_overlapped_steps(own: Controller) -> None:
    """Decided and launched before the outcome of the one before is known; each outcome meets its own gamma and time."""
    policy, now, gammas = own.planner.policy, [0.0], []  # type: ignore[union-attr]
    own.clock = lambda: now[0]
    reqs = [request(10) for _ in range(3)]
    server = scheduler(batch(*reqs))
    server.waiting_queue = []

    def launch_s(gamma: int) -> float:
        return 0.01 * (gamma + 1)

    def process(*_: Any) -> None:
        now[0] += 0.002

    def receive(*_: Any) -> None:
        lockstep.carry_directive(lambda receiver, reqs, local: reqs, None, [])

    def land(number: int) -> None:
        result = result_of(*[gammas[number - 1] + 1] * 3)  # every draft accepted
        outcome.report_outcome(process, server, batch(*reqs, number=number, overlap=True), result)

    for number in range(1, 1001):
        lockstep.go_on(receive, server)
        assert own.directive.step == number, "every launch has a decision of its own"
        gammas.append(own.gamma)
        running = batch(*reqs, number=number, overlap=True)
        running.launch_ts = now[0]
        now[0] += launch_s(own.gamma)
        launch(own, running, StepFacts(own.gamma, drafted=3 if own.gamma else 0))
        if number > 1:
            land(number - 1)
    land(1000)
    assert set(gammas) == set(range(6)) and sum(a != b for a, b in pairwise(gammas)) > 700
    assert [seen.gamma for seen in policy.seen] == gammas
    for seen in policy.seen:
        assert seen.committed == (*[0] * seen.gamma, 3)
        assert seen.seconds == pytest.approx(launch_s(seen.gamma) + 0.002)
    assert own.counters.steps_by_gamma == [gammas.count(gamma) for gamma in range(6)]
