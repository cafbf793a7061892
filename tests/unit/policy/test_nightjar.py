"""The default planner."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from baseline_world import BAD_OBSERVATIONS, Played, World, assert_replays, observation, play, run, states
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.policy.base import Observation, Residency, State, StepKind
from sglang_nightjar.policy.nightjar import NightjarPolicy, NightjarSettings, _bucket
from sglang_nightjar.simulate.suite_regret import CHANGES, change_run, stationary_run

MAX_GAMMA = 3
PAYS = World(0.8, draft_s=0.0005, noise=0.05)
COSTS = World(0.2, draft_s=0.008, noise=0.05)  # off is best by 15 %; with perfect drafts, on would be


def make(**options: Any) -> NightjarPolicy:
    return NightjarPolicy(MAX_GAMMA, seed=3, settings=NightjarSettings(**options))


def switches(played: list[Played]) -> list[float]:
    """When off and on changed."""
    return [step.now_s for last, step in zip(played, played[1:], strict=False) if (last.gamma > 0) != (step.gamma > 0)]


def even_world() -> World:
    """One in which the best gamma above 0 is exactly as good as 0, at 8 requests of 400 tokens."""
    low, high = 0.0, 0.05
    for _ in range(60):
        middle = (low + high) / 2
        world = World(0.6, draft_s=middle, noise=0.1)
        gain = max(world.goodput(8, 3200, gamma) for gamma in (1, 2, 3)) - world.goodput(8, 3200, 0)
        low, high = (middle, high) if gain > 0 else (low, middle)
    return World(0.6, draft_s=low, noise=0.1)


# ---- how well it chooses ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["4090, B 16", "4090, B 8 to 128", "4090, B 192"])
def test_comes_close_to_the_oracle(name: str) -> None:
    found = stationary_run(name, "nightjar", 20_000, seed=1)
    assert found["excess"] < 0.03
    assert found["late_excess"] < 0.01


@pytest.mark.parametrize("name", CHANGES)
def test_recovers_from_an_abrupt_change(name: str) -> None:
    assert change_run(name, "nightjar", 1000, seed=2)["excess"] < 0.05


def test_a_change_of_acceptance_starts_every_context_over() -> None:
    policy = make()
    play(policy, PAYS, [8] * 300 + [2] * 300)
    assert len(policy.snapshot()["contexts"]) == 2
    for _ in range(20):
        policy.observe(observation(3, (8,)))  # all rejected
        if policy.acceptance.changes:
            break
    assert policy.acceptance.changes == 1
    assert policy.snapshot()["contexts"] == []


@pytest.mark.parametrize("world", [PAYS, COSTS])
def test_observations_may_come_one_decision_late(world: World) -> None:
    late = [step.gamma for step in play(make(), world, [8] * 1500, late=1)[500:]]
    assert late.count(world.best(8, 3200, MAX_GAMMA)) > 900


def test_a_batch_size_never_met_is_decided_from_the_others() -> None:
    world = World(0.7, draft_s=0.001, token_s=1e-3, noise=0.05)
    policy = make()
    play(policy, world, [size for _ in range(150) for size in (1, 4, 96)])
    assert world.best(2, 800, MAX_GAMMA) == 3
    losses = [policy.loss(gamma, State(99.0, 48, 48 * 400), free=True) for gamma in range(MAX_GAMMA + 1)]
    for gamma, loss in enumerate(losses):
        assert loss == pytest.approx(1.0 / world.goodput(48, 48 * 400, gamma), rel=0.12)


# ---- exploring: bins, budget, SLO ----------------------------------------------------------


class Locks:
    """Checks each decision of a policy against the rule that an arm is locked in its bin."""

    def __init__(self, policy: NightjarPolicy) -> None:
        self.policy = policy
        self.kept = self.chosen = 0

    def decide(self, state: State) -> int:
        policy, key = self.policy, _bucket(state.batch_size)
        context = policy._contexts.get(key)
        opening = bool(policy._opening)
        probing, revision, side = policy._probe_left, policy._revision, policy._gamma > 0
        gamma = policy.decide(state)
        if opening or state.residency is not Residency.RESIDENT or probing > 1:
            return gamma
        arm, now = policy._contexts[key].arm, policy._contexts[key]
        if probing == 0 and now is context and self.left[key] > 0 and self.revision[key] == revision:
            assert arm == self.arm[key]
            self.kept += 1
        else:
            self.chosen += 1
        if probing == 0 and policy._probe_left == 0 and (arm > 0) == side:
            assert gamma == arm  # neither a probe nor the dwell overrides it
        self.left[key], self.revision[key], self.arm[key] = now.schedule.bin_left, policy._revision, arm
        return gamma

    def __getattr__(self, name: str) -> Any:
        if name in ("left", "revision", "arm"):
            self.__dict__[name] = {}
            return self.__dict__[name]
        return getattr(self.policy, name)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 60)), min_size=3, max_size=12),
    st.floats(0.05, 0.95),
    st.sampled_from([0.0002, 0.002, 0.008]),
)
def test_arms_stay_locked_in_their_bins(loads: list[tuple[int, int]], acceptance: float, draft_s: float) -> None:
    locks = Locks(make())
    play(locks, World(acceptance, draft_s=draft_s, noise=0.2), [size for size, steps in loads for _ in range(steps)])


def test_most_decisions_play_a_locked_arm() -> None:
    locks = Locks(make())
    play(locks, PAYS, [8] * 3000)
    assert locks.kept > 2500 and locks.chosen > 60


def test_an_arm_is_locked_no_longer_than_the_longest_bin() -> None:
    locks = Locks(make(longest_bin=4))
    play(locks, PAYS, [8] * 1000)
    assert locks.kept <= 0.76 * 1000


def test_starts_with_a_few_steps_of_either_side() -> None:
    # Short of the start, no arm is played untried: 0 and the first gamma tell of the others.
    assert run(make(first_gamma=2, trials=3), PAYS, states(6)) == [0, 0, 0, 2, 2, 2]
    assert run(make(first_gamma=9, trials=1), PAYS, states(2)) == [0, 3]


def test_explores_among_arms_that_could_be_best_only() -> None:
    clear = World(0.9, draft_s=0.0002, noise=0.02)  # 3 gains 30 % over 2
    played = [step.gamma for step in play(make(), clear, [8] * 2000)[50:]]
    assert played.count(3) > 0.97 * len(played)
    close = World(0.5, draft_s=0.0035, noise=0.2)  # 1 and 2 within 2 %
    played = [step.gamma for step in play(make(), close, [8] * 2000)[50:]]
    assert min(played.count(1), played.count(2)) > 20


def test_exploring_keeps_the_limit_on_seconds_per_token() -> None:
    world = World(0.8, draft_s=0.0005, noise=0.02)
    times = {gamma: 8 / world.goodput(8, 3200, gamma) for gamma in range(MAX_GAMMA + 1)}
    assert min(times, key=times.__getitem__) == 3
    limit = (times[3] + times[2]) / 2
    careless = [step.gamma for step in play(make(caution=1e4), world, [8] * 3000)[100:]]
    careful = [step.gamma for step in play(make(caution=1e4, tpot_slo_s=limit), world, [8] * 3000)[100:]]
    assert len(careless) - careless.count(3) > 30
    assert careful.count(3) == len(careful)
    # A limit that no arm meets asks for the least violation, which exploring must find.
    hopeless = [step.gamma for step in play(make(caution=1e4, tpot_slo_s=times[3] / 9), world, [8] * 3000)[100:]]
    assert hopeless.count(3) > 2000


# ---- off and on ------------------------------------------------------------------------------


def test_at_a_crossover_it_switches_at_most_once_a_second() -> None:
    world = even_world()
    played = play(make(), world, [8] * 10_000)
    begin = played[100].now_s
    found = [at for at in switches(played) if at > begin]
    lasted = played[-1].now_s - begin
    assert lasted > 150.0
    assert len(found) <= lasted
    # A probe goes there and back within a few steps; apart from these, the dwell passes between two switches.
    longest_probe = 8 * max(step.seconds for step in played)
    quick = sum(later - earlier < 1.0 for earlier, later in zip(found, found[1:], strict=False))
    there_and_back = sum(later - earlier < longest_probe for earlier, later in zip(found, found[1:], strict=False))
    assert quick == there_and_back
    assert 2 * quick <= lasted


def test_a_large_gain_need_not_wait_for_the_dwell() -> None:
    world = World(0.5, draft_s=0.0005, token_s=1e-3)  # on pays for 2 requests, off by far for 300
    policy = make(dwell_s=1000.0)
    warm = play(policy, world, [2] * 60 + [300] * 60 + [2] * 60)
    assert [step.gamma > 0 for step in (warm[59], warm[119], warm[179])] == [True, False, True]
    patient = make(dwell_s=1000.0, urgent=1.0)
    held = play(patient, world, [2] * 60 + [300] * 60)
    assert held[119].gamma > 0


@pytest.mark.parametrize("share", [0.01, 0.03])
def test_probing_while_off_costs_no_more_than_its_share(share: float) -> None:
    played = play(make(probe_share=share), COSTS, [8] * 6000)
    settled = played[500:]
    plain = COSTS.seconds(8, 3200, 0)
    probes = [step for step in settled if step.gamma > 0]
    assert probes  # the budget is used
    lost = sum(step.seconds - plain for step in probes)
    assert lost < share * sum(step.seconds for step in settled)


def test_without_a_budget_it_does_not_probe() -> None:
    played = play(make(probe_share=0.0), COSTS, [8] * 2000)
    assert {step.gamma for step in played[200:]} == {0}


def test_a_probe_finds_that_drafts_have_become_good() -> None:
    policy = make()
    before = play(policy, COSTS, [8] * 1500)
    assert before[-1].gamma == 0
    good = World(0.95, draft_s=0.008, noise=0.05)
    after = play(policy, good, [8] * 4000, start_s=before[-1].now_s + 0.03)
    assert [step.gamma > 0 for step in after[-500:]].count(True) > 450


# ---- what it must never do -------------------------------------------------------------------

MOMENTS = st.lists(
    st.tuples(
        st.sampled_from([0.01, 0.3, 3.0, 60.0]),  # seconds since the last
        st.integers(1, 300),
        st.integers(0, 5000),  # lag
        st.sampled_from([Residency.RESIDENT] * 4 + list(Residency)),
        st.integers(1, 12),  # decisions it lasts
    ),
    min_size=1,
    max_size=30,
)


def as_states(moments: list[tuple[Any, ...]], start_s: float = 0.0) -> list[State]:
    now_s, found = start_s, []
    for wait_s, batch_size, lag, residency, lasts in moments:
        for _ in range(lasts):
            now_s += wait_s
            found.append(State(now_s, batch_size, 400 * batch_size, max_lag=lag, residency=residency))
    return found


@settings(max_examples=60, deadline=None)
@given(MOMENTS, st.floats(0.0, 1.0))
def test_never_speculates_without_a_resident_draft(moments: list[tuple[Any, ...]], acceptance: float) -> None:
    where = as_states(moments)
    for state, gamma in zip(where, run(make(), World(acceptance, draft_s=0.001), where), strict=True):
        assert 0 <= gamma <= MAX_GAMMA
        assert gamma == 0 or state.residency is Residency.RESIDENT


def test_speculates_again_when_the_draft_is_back() -> None:
    policy = make()
    play(policy, PAYS, [8] * 300)
    away = [replace(state, now_s=state.now_s + 100.0) for state in states(200, residency=Residency.EVICTED)]
    assert set(run(policy, PAYS, away)) == {0}
    back = play(policy, PAYS, [8] * 300, start_s=110.0)
    assert [step.gamma for step in back[50:]].count(3) > 200


@settings(max_examples=40, deadline=None)
@given(MOMENTS, MOMENTS, st.floats(0.0, 1.0), st.sampled_from([0.0002, 0.004]))
def test_a_snapshot_at_any_moment_replays(
    before: list[tuple[Any, ...]], after: list[tuple[Any, ...]], acceptance: float, draft_s: float
) -> None:
    first = as_states(before)
    world = World(acceptance, draft_s=draft_s, noise=0.2)
    assert_replays(make, world, first, as_states(after, first[-1].now_s))


def test_a_snapshot_in_the_middle_of_a_probe_replays() -> None:
    policy, restored = make(), make()
    moments = [State(0.03 * step, 8, 3200, max_lag=50) for step in range(12_000)]
    for index, state in enumerate(moments):
        policy.observe(COSTS.step(state, policy.decide(state)))
        if index > 500 and policy._probe_left == 3:
            break
    else:
        pytest.fail("no probe")
    restored.restore(policy.snapshot())
    rest = moments[index + 1 : index + 300]
    worlds = [World(0.2, draft_s=0.008, noise=0.05) for _ in range(2)]
    decided = run(policy, worlds[0], rest)
    assert decided[0] > 0
    assert run(restored, worlds[1], rest) == decided


def test_decides_by_its_seed() -> None:
    def decided(seed: int) -> list[int]:
        close = World(0.5, draft_s=0.0022, noise=0.2)
        return [step.gamma for step in play(NightjarPolicy(5, seed=seed), close, [8] * 600)]

    assert decided(1) == decided(1) != decided(2)


@pytest.mark.parametrize(("field", "seen"), BAD_OBSERVATIONS)
def test_a_bad_observation_is_rejected_and_changes_nothing(field: str, seen: Observation) -> None:
    policy = make()
    run(policy, PAYS, states(5))
    before = policy.snapshot()
    with pytest.raises(ValueError, match=field):
        policy.observe(seen)
    assert policy.snapshot() == before


def step_times(policy: NightjarPolicy) -> dict[str, Any]:
    return policy.step_time.snapshot()


@pytest.mark.parametrize(
    "seen",
    [
        observation(0, (8,), prefill_tokens=2000, kind=StepKind.MIXED),  # of unknown decoding time
        observation(3, (8,), drafted=5),  # part plain
        observation(2, (8,), 0.5, catchup_seconds=0.5, catchup_tokens=80),  # nothing left of it
        observation(0, (), kind=StepKind.PREFILL, prefill_tokens=100),
    ],
)
def test_only_whole_decode_steps_teach_step_time(seen: Observation) -> None:
    policy = make()
    run(policy, PAYS, states(10))
    before = step_times(policy)
    policy.observe(seen)
    assert step_times(policy) == before
    policy.observe(observation(3, (8,)))
    assert step_times(policy) != before


def test_a_catch_up_teaches_the_switch_cost_and_not_the_step_time() -> None:
    policy, plain = make(), make()
    policy.observe(observation(2, (4, 4), 0.25, catchup_seconds=0.125, catchup_tokens=800))
    plain.observe(observation(2, (4, 4), 0.125))
    assert step_times(policy) == step_times(plain)
    assert policy.acceptance.snapshot() == plain.acceptance.snapshot()
    assert policy.switch_cost(100, 8) > 5 * plain.switch_cost(100, 8)


def test_it_remembers_no_more_the_longer_it_runs() -> None:
    policy, draw = make(), random.Random(8)
    worlds = [World(0.7, draft_s=0.001), World(0.3, draft_s=0.004)]
    # Steps are drawn beforehand. To be quick, the draft is there for one in eight, and five in six prefill too.
    steps: list[tuple[State, list[Observation]]] = []
    for index in range(4000):
        size, prefill = 1 + draw.randrange(6), draw.choice((0, 500, 500, 500, 500, 500))
        where = Residency.RESIDENT if index % 8 == 0 else Residency.EVICTED
        state = State(0.0, size, draw.randint(1, 1000) * size, max_lag=draw.randint(0, 1000), residency=where)
        seen = [worlds[index // 2000].step(state, gamma) for gamma in range(MAX_GAMMA + 1)]
        drafted = [replace(one, catchup_tokens=size * 9, catchup_seconds=0.001 * size) for one in seen[1:]]
        steps.append((state, [replace(one, prefill_tokens=prefill) for one in (seen[0], *drafted)]))

    def go(first: int, last: int) -> None:
        for index in range(first, last):
            state, seen = steps[draw.randrange(2000) + 2000 * (index // 10_000 % 2)]
            policy.observe(seen[policy.decide(replace(state, now_s=0.03 * index))])

    def held() -> tuple[int, ...]:
        saved = policy.snapshot()
        return tuple(map(len, (saved["contexts"], saved["step_time"]["cells"], saved["switch_cost"]["cells"])))

    go(0, 40_000)
    blocks = sys.getallocatedblocks()
    go(40_000, 200_000)
    assert sys.getallocatedblocks() - blocks < 1000
    contexts, cells, switch_cells = held()
    assert contexts <= 5 and cells <= 6 * (MAX_GAMMA + 1) and 0 < switch_cells <= 6


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 255, 256])
def test_batch_sizes_of_one_context_are_within_half_of_each_other(size: int) -> None:
    same = [other for other in range(1, 1025) if _bucket(other) == _bucket(size)]
    assert same == list(range(same[0], same[-1] + 1))
    assert same[-1] < 1.5 * same[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *(({name: 0}, name) for name in ("tpot_slo_s", "trials", "horizon", "probe_steps", "longest_bin")),
        *(({name: -0.1}, name) for name in ("tpot_slo_s", "margin", "dwell_s", "urgent", "probe_share", "caution")),
        *(({name: float("nan")}, name) for name in ("tpot_slo_s", "margin", "dwell_s", "probe_share")),
    ],
)
def test_settings_that_cannot_be_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        NightjarSettings(**fields)


@pytest.mark.parametrize("build", [lambda: NightjarPolicy(1), lambda: NightjarPolicy(16)])
def test_any_number_of_arms(build: Callable[[], NightjarPolicy]) -> None:
    policy = build()
    played = [step.gamma for step in play(policy, World(0.9, draft_s=0.0002), [4] * 300)]
    assert max(played) <= policy.max_gamma
    assert played[-1] >= min(policy.max_gamma, 3)
