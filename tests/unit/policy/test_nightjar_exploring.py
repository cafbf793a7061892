"""The default planner's bins, and which arms it explores."""

from typing import Any

import pytest
from baseline_world import World, observation, play, run, states
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.policy.base import Residency, State, StepKind
from sglang_nightjar.policy.nightjar import NightjarPolicy, _bucket
from sglang_nightjar.policy.nightjar_settings import NightjarSettings

MAX_GAMMA = 3
PAYS = World(0.8, draft_s=0.0005, noise=0.05)


def make(seed: int = 3, **options: Any) -> NightjarPolicy:
    return NightjarPolicy(MAX_GAMMA, seed=seed, settings=NightjarSettings(**options))


class Locks:
    """Checks each decision of a policy against the rule that an arm is locked in its bin, or until it is ruled out."""

    def __init__(self, policy: NightjarPolicy) -> None:
        self.policy = policy
        self.kept = self.chosen = self.ruled_out = 0

    def decide(self, state: State) -> int:
        policy, key = self.policy, _bucket(state.batch_size)
        context = policy._contexts.get(key)
        opening = bool(policy._opening)
        tried = context is not None and context.tries
        losses = policy._losses(state)
        best = policy._best(losses, state)
        probing, revision, side = policy._probe_left, policy._revision, policy._gamma > 0
        gamma = policy.decide(state)
        if opening or state.residency is not Residency.RESIDENT or probing > 1:
            return gamma
        arm, now = policy._contexts[key].arm, policy._contexts[key]
        if probing == 0 and now is context and self.left[key] > 0 and self.revision[key] == revision:
            if arm == self.arm[key]:
                self.kept += 1
            else:  # only a trial ends before its bin, and then for the rest of it
                assert tried and not now.tries
                assert arm == best
                assert best == 0 or not policy._may_beat(self.arm[key], best, losses, state)
                self.ruled_out += 1
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


def test_a_trial_ends_once_its_arm_is_ruled_out() -> None:
    world = World(0.5, draft_s=0.008, noise=0.01)  # two drafts are worse than one by 10 %
    assert world.best(8, 3200, MAX_GAMMA) == 1
    ruled_out = 0
    for seed in range(8):
        locks = Locks(make(seed, caution=2.0))
        play(locks, world, [8] * 3000)
        ruled_out += locks.ruled_out
    assert ruled_out >= 3


def test_only_neighbours_of_the_best_arm_are_tried() -> None:
    world = World(0.35, draft_s=0.003, noise=0.01)
    played = [step.gamma for step in play(make(caution=1e4), world, [8] * 3000)[20:]]
    assert played.count(2) > 30 and played.count(3) == 0


class Watched:
    """Counts the decisions in which a policy tried an arm that only might be the best."""

    def __init__(self, policy: NightjarPolicy) -> None:
        self.policy = policy
        self.tries = 0

    def decide(self, state: State) -> int:
        gamma = self.policy.decide(state)
        context = self.policy._contexts.get(_bucket(state.batch_size))
        self.tries += context is not None and context.tries
        return gamma

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def test_nothing_is_tried_where_the_best_arm_is_hardly_known() -> None:
    close = World(0.5, draft_s=0.0035, noise=0.2)  # 1 and 2 within 2 %
    sizes = [4 + index % 37 for index in range(37 * 12)]  # each a dozen times
    impatient, patient = Watched(make(known=0)), Watched(make(known=13))
    for policy in (impatient, patient):
        play(policy, close, sizes)
    assert patient.tries == 0 < impatient.tries


def test_a_full_batch_is_tried_with_drafts_when_that_is_earned() -> None:
    policy, world = make(), World(0.5, draft_s=0.004)
    cost = policy.model.switch_cost(400, 100)  # the draft has read none of the prompts
    full = [State(0.01 * step, 100, 100 * 400, max_lag=400) for step in range(2000)]
    played = run(policy, world, full)
    first = next(index for index, gamma in enumerate(played) if gamma > 0)
    assert played[first] == 1
    assert full[first].now_s == pytest.approx(cost / policy.settings.probe_share, rel=0.01)
    # The target has read them at 1 ms a token; a draft is not taken for more than ten times as fast.
    slow, prompts = make(), observation(0, (), 100.0, kind=StepKind.PREFILL, prefill_tokens=100_000)
    slow.observe(prompts)
    assert slow.model.first_reading_s(full[0]) == pytest.approx(0.1 * 1e-3 * 100 * 400)
    assert set(run(slow, world, full)) == {0}
    few = [State(0.01 * step, 64, 64 * 400, max_lag=400) for step in range(4)]
    assert run(make(), world, few) == [0, 0, 3, 3]


def test_a_step_in_which_the_draft_still_reads_is_no_trial() -> None:
    lags = [900, 900, 900, 600, 300, 1, 1]
    where = [State(0.03 * step, 8, 8 * 1000, max_lag=lag) for step, lag in enumerate(lags)]
    policy = make()
    assert run(policy, PAYS, where[:6]) == [0, 0, 3, 3, 3, 3]
    assert policy._opening == []
    # One that opted out lags for ever; that is no reason to wait for ever.
    for_ever = [State(0.03 * step, 8, 8 * 1000, max_lag=900) for step in range(40)]
    policy = make()
    run(policy, PAYS, for_ever)
    assert policy._opening == []


def test_starts_with_a_few_steps_of_either_side() -> None:
    # Short of the start, no arm is played untried: 0 and the first gamma tell of the others.
    assert run(make(first_gamma=2, trials=3), PAYS, states(6)) == [0, 0, 0, 2, 2, 2]
    assert run(make(first_gamma=9, trials=1), PAYS, states(2)) == [0, 3]


def test_explores_among_arms_that_could_be_best_only() -> None:
    clear = World(0.9, draft_s=0.0002, noise=0.02)  # 3 gains 30 % over 2
    played = [step.gamma for step in play(make(), clear, [8] * 2000)[50:]]
    assert played.count(3) > 0.97 * len(played)
    close = World(0.5, draft_s=0.0035, noise=0.2)  # 1 and 2 within 2 %
    played = [step.gamma for seed in range(4) for step in play(make(seed), close, [8] * 1000)[50:]]
    assert min(played.count(1), played.count(2)) > 80


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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 255, 256])
def test_batch_sizes_of_one_context_are_within_half_of_each_other(size: int) -> None:
    same = [other for other in range(1, 1025) if _bucket(other) == _bucket(size)]
    assert same == list(range(same[0], same[-1] + 1))
    assert same[-1] < 1.5 * same[0]
