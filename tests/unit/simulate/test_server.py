"""The event loop: nothing is lost, times add up, memory is respected, the draft's lag costs what it should."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang_nightjar.policy.base import Decision, Move, Observation, Residency, State, StepKind, check_observation
from sglang_nightjar.simulate.acceptance import AcceptanceSpec, Domain
from sglang_nightjar.simulate.protocols import ServerOptions
from sglang_nightjar.simulate.record import Record
from sglang_nightjar.simulate.server import Server
from sglang_nightjar.simulate.workload import Named, Poisson, Work, draw_work


class FlatCost:
    """Round numbers: a decode step takes 1 s plus 0.1 s per drafted token; reading a token takes 1 ms."""

    max_gamma = 5

    def __init__(self, small: int = 100_000, large: int = 150_000) -> None:
        self.small, self.large = small, large

    def slots(self, resident: bool) -> int:
        return self.small if resident else self.large

    def step_s(self, batch: int, gamma: int, kv_tokens: float, **parts: Any) -> float:
        return 1.0 + 0.1 * gamma + 1e-3 * parts.get("prefill_tokens", 0)

    def prefill_s(self, tokens: int, kv_tokens: float, draft: bool) -> float:
        return 1e-3 * tokens

    def catchup_s(self, tokens: int, kv_tokens: float) -> float:
        return 1e-3 * tokens

    def relocate_s(self, slots: float) -> float:
        return 1e-4 * slots

    def reload_s(self) -> float:
        return 5.0


class Scripted:
    """Plays `choose(state)`, and checks and keeps everything it is told."""

    def __init__(
        self, choose: Callable[[State], Decision], reads: Callable[[State], bool] = lambda state: True
    ) -> None:
        self.choose, self.reads_prompts = choose, reads
        self.states: list[State] = []
        self.seen: list[Observation] = []

    def decide(self, state: State) -> Decision:
        self.states.append(state)
        return self.choose(state)

    def observe(self, seen: Observation) -> None:
        check_observation(seen, 5)
        assert seen.free_slots <= seen.total_slots
        self.seen.append(seen)

    @property
    def decoded(self) -> list[Observation]:
        return [seen for seen in self.seen if seen.kind is not StepKind.PREFILL]


def fixed(gamma: int) -> Scripted:
    return Scripted(lambda state: Decision(gamma))


def work_of(*lengths: tuple[int, int], at: float | list[float] = 0.0, concurrency: int | None = None) -> Work:
    prompt, output = np.array(lengths, np.int64).T
    return Work(np.broadcast_to(np.array(at, float), prompt.shape).copy(), prompt.copy(), output.copy(), concurrency)


def serve(
    planner: Scripted, work: Work, cost: FlatCost | None = None, alpha: float = 0.7, **options: Any
) -> tuple[Server, Record]:
    spec = AcceptanceSpec(domains=(Domain(alpha),))
    server = Server(cost or FlatCost(), work, planner, spec, ServerOptions(**{"time_noise": 0.0, **options}), 1)
    return server, server.run()


@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("pool", [100_000, 900])
def test_every_request_gets_exactly_its_tokens(gamma: int, mixed: bool, pool: int) -> None:
    work = draw_work(Poisson(1.5), Named("alpaca"), 100.0, 10_000, seed=2)
    planner = fixed(gamma)
    options = {"mixed": mixed, "chunk": 64, "max_running": 16, "decode_reserve": 8}
    server, record = serve(planner, work, FlatCost(pool, pool), **options)
    fits = work.prompt + work.output <= pool - 6
    assert record.rejected == int((~fits).sum())
    assert np.isfinite(record.finish_s[fits]).all() and np.isnan(record.finish_s[~fits]).all()
    assert (record.first_s[fits] > work.arrival_s[fits]).all()
    assert (record.finish_s[fits] >= record.first_s[fits]).all()
    assert record.all_tokens == int(work.output[fits].sum())
    assert server._used == server._kv == server._run.count == 0
    # Whatever the planner saw adds up too: the first token after each prefill is not of a decode step.
    from_prefill = record.all_tokens - sum(seen.tokens for seen in planner.seen)
    assert int(fits.sum()) <= from_prefill <= int(fits.sum()) + record.preemptions
    if pool == 900:
        assert record.preemptions > 0


def test_closed_loop_throughput_by_hand() -> None:
    # 4 clients, 10 tokens each: a prefill of 4 * 20 tokens (0.08 s, first token), then 9 steps of 1 s.
    _, record = serve(fixed(0), work_of(*[(20, 10)] * 12, concurrency=4))
    assert record.end_s == pytest.approx(3 * (0.08 + 9.0))
    assert record.all_tokens == 120
    assert record.first_s[:4] == pytest.approx(0.08)
    assert record.gammas[0] == 26  # the window closes in the step in which a client has nothing more to send


def test_full_acceptance_commits_gamma_and_one() -> None:
    planner = fixed(4)
    _, record = serve(planner, work_of((20, 11)), alpha=1.0)
    # 1 token from the prefill, then two steps of 5; the draft first reads the 20 tokens of the prompt.
    assert record.end_s == pytest.approx(0.02 + 0.02 + 2 * 1.4)
    first, last = planner.decoded
    assert first.committed == (0, 0, 0, 0, 1) and first.cut == 0 and first.tokens == 5
    assert last.committed == (0, 0, 0, 0, 0) and (last.cut, last.cut_tokens) == (1, 5)


def test_a_request_ending_at_gamma_zero_is_not_cut() -> None:
    planner = fixed(0)
    serve(planner, work_of((20, 3)))
    assert [seen.committed for seen in planner.decoded] == [(1,), (1,)]
    assert [seen.cut for seen in planner.decoded] == [0, 0]


def test_catch_up_is_charged_once_and_lag_is_what_the_draft_missed() -> None:
    planner = Scripted(lambda state: Decision(0 if state.now_s < 10 else 1))
    serve(planner, work_of((100, 40), (100, 40)))
    on = next(i for i, state in enumerate(planner.states) if state.now_s >= 10)
    # Off for `on` steps: the prompt and one token per step are unseen.
    assert planner.states[on].max_lag == 100 + on
    assert planner.decoded[on].catchup_tokens == 2 * (100 + on)
    assert planner.decoded[on].catchup_seconds == pytest.approx(2e-3 * (100 + on))
    assert planner.decoded[on].drafted == 2
    assert all(seen.catchup_tokens == 0 for seen in planner.decoded[on + 1 :])
    assert planner.decoded[on + 1].max_lag == 0


def test_a_catch_up_over_budget_is_spread_and_those_behind_do_not_draft() -> None:
    planner = fixed(2)
    serve(planner, work_of((50, 30), (400, 30)), alpha=1.0, catchup_budget=100)
    steps = planner.decoded
    assert steps[0].catchup_tokens == 100 and steps[0].drafted == 1  # 50 of the first, 50 of the second
    assert steps[0].committed == (1, 0, 1)
    # 350 are left, and one more comes with every step that it does not draft in.
    assert [seen.catchup_tokens for seen in steps[1:5]] == [100, 100, 100, 50 + 4]
    assert [seen.drafted for seen in steps[1:5]] == [1, 1, 1, 2]


def test_the_draft_reads_prompts_only_while_speculating() -> None:
    planner = Scripted(lambda state: Decision(2 if state.now_s < 8 else 0))
    serve(planner, work_of((30, 60), (70, 60), (50, 60), at=[0.0, 3.0, 12.0]), alpha=0.0)
    lags = {state.batch_size: state.max_lag for state in reversed(planner.states)}
    assert lags[2] == 0  # came while speculating
    assert lags[3] == 50 or lags[3] >= planner.states[-1].max_lag - 60


def test_the_planner_keeps_the_draft_from_prompts_by_the_batch_they_make() -> None:
    asked: list[State] = []

    def reads(state: State) -> bool:
        asked.append(state)
        return state.batch_size < 3

    planner = Scripted(lambda state: Decision(2), reads)
    serve(planner, work_of((30, 200), (70, 200), (50, 200), (40, 200), at=[0.0, 1.0, 2.0, 2.0]), alpha=0.0)
    assert [(state.batch_size, state.queue_length) for state in asked] == [(2, 0), (4, 0)]
    caught = [(seen.batch_size, seen.catchup_tokens) for seen in planner.decoded if seen.catchup_tokens]
    # The first comes before anything was decided; the last two were not read, and were caught up with.
    assert caught == [(1, 30), (4, 90)]


def test_requests_are_retracted_when_the_pool_is_full_and_recomputed() -> None:
    planner = fixed(0)
    _, record = serve(planner, work_of((40, 50), (40, 50)), FlatCost(120, 120), decode_reserve=0)
    # 80 slots of 120 taken; both grow by 1 per step, so the younger one goes after 20 steps.
    assert record.preemptions == 1
    assert record.finish_s[0] < record.finish_s[1]
    prefills = [seen.prefill_tokens for seen in planner.seen if seen.kind is StepKind.PREFILL]
    assert prefills == [80, 40 + 21]
    assert planner.decoded[19].free_slots == 0
    assert record.first_s[1] == record.first_s[0]


def test_the_queue_waits_for_slots_and_says_so() -> None:
    planner = fixed(0)
    serve(planner, work_of((60, 20), (60, 20)), FlatCost(110, 110))
    assert planner.states[0].batch_size == 1 and planner.states[0].queue_blocked
    assert planner.states[0].queue_length == 1
    assert not planner.states[-1].queue_blocked


def test_all_output_is_kept_free_where_requests_cannot_end_early() -> None:
    lengths = [(40, 50), (20, 5), (40, 50)]
    _, record = serve(fixed(0), work_of(*lengths), FlatCost(120, 120), decode_reserve=0, reserve_output=True)
    # 90 and 25 fit 120; the third has to wait until the first has ended, and nobody is retracted.
    assert record.preemptions == 0
    assert record.first_s[0] == record.first_s[1] < record.finish_s[0] <= record.first_s[2]
    _, record = serve(fixed(0), work_of(*lengths), FlatCost(120, 120), decode_reserve=0)
    assert record.preemptions == 1 and record.first_s[2] == record.first_s[0]


def test_speculation_reserves_gamma_more_slots() -> None:
    lengths = [(40, 50), (40, 50)]
    # Before their last step both hold 40 + 48 tokens; 180 slots leave room for one more token each, not for six.
    _, plain = serve(fixed(0), work_of(*lengths), FlatCost(180, 180), decode_reserve=0)
    _, speculative = serve(fixed(5), work_of(*lengths), FlatCost(180, 180), alpha=0.0, decode_reserve=0)
    assert plain.preemptions == 0
    assert speculative.preemptions == 1


def test_eviction_grows_the_pool_and_reload_shrinks_it_again() -> None:
    def choose(state: State) -> Decision:
        if state.residency is Residency.RESIDENT and 5 < state.now_s < 10:
            return Decision(0, Move.EVICT)
        if state.residency is Residency.EVICTED and state.now_s > 20:
            return Decision(0, Move.RELOAD)
        return Decision(1 if state.residency is Residency.RESIDENT else 0)

    planner = Scripted(choose)
    options = {"evict_s": 2.5, "move_s": 0.25, "margin": 100}
    _, record = serve(planner, work_of((900, 60)), FlatCost(1000, 1500), alpha=0.0, **options)
    stages = [state.residency for state in planner.states]
    order = [stage for i, stage in enumerate(stages) if i == 0 or stage is not stages[i - 1]]
    assert order[:3] == [Residency.RESIDENT, Residency.EVICTING, Residency.EVICTED]
    sizes = {state.residency: state.total_slots for state in planner.states}
    assert sizes[Residency.RESIDENT] == sizes[Residency.EVICTING] == 1000
    assert sizes[Residency.EVICTED] == 1500
    # 900 tokens and the margin never fit 1000: the reload is put off to the end.
    assert (record.evictions, record.reloads) == (1, 0)
    assert record.postponed > 5


def test_a_reload_that_fits_relocates_then_transfers_then_catches_up() -> None:
    moves = {"evicted": False}

    def choose(state: State) -> Decision:
        if state.residency is Residency.EVICTED:
            return Decision(0, Move.RELOAD)
        if state.residency is Residency.RESIDENT and not moves["evicted"]:
            moves["evicted"] = True
            return Decision(0, Move.EVICT)
        return Decision(1 if state.residency is Residency.RESIDENT else 0)

    planner = Scripted(choose)
    options = {"evict_s": 0.5, "move_s": 0.25, "margin": 100}
    _, record = serve(planner, work_of((200, 30)), FlatCost(1000, 1500), alpha=0.0, **options)
    assert (record.evictions, record.reloads, record.postponed) == (1, 1, 0)
    assert planner.decoded[0].seconds == pytest.approx(1.25)
    # Used 201 of 1500 slots, a third of them in the tail: 67 * 1e-4 s, and the pause.
    assert planner.decoded[1].seconds == pytest.approx(1.0 + 0.25 + 201 / 3 * 1e-4)
    assert planner.decoded[1].total_slots == 1000
    back = next(i for i, state in enumerate(planner.states) if i > 1 and state.residency is Residency.RESIDENT)
    assert back == 6  # the transfer takes 5 s: decoding went on at gamma 0 meanwhile
    assert planner.states[back].max_lag == 200 + back
    assert planner.decoded[back].catchup_tokens == 200 + back


def test_a_planner_may_not_draft_without_the_draft() -> None:
    with pytest.raises(ValueError, match="gamma 1 while the draft is EVICTED"):
        serve(fixed(1), work_of((10, 10)), start_evicted=True)


def test_a_run_repeats_under_its_seed() -> None:
    runs = []
    for _ in range(2):
        planner = fixed(3)
        work = draw_work(Poisson(2.0), Named("alpaca"), 50.0, 10_000, seed=5)
        _, record = serve(planner, work, time_noise=0.1)
        runs.append((record.finish_s.tolist(), planner.seen))
    assert runs[0] == runs[1]


def test_observations_follow_the_clock() -> None:
    planner = fixed(2)
    _, record = serve(planner, work_of((100, 50)), time_noise=0.2)
    assert sum(seen.seconds for seen in planner.seen) == pytest.approx(record.end_s)
