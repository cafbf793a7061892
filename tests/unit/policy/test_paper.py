"""The published algorithm, literally."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from baseline_world import BAD_OBSERVATIONS, World, assert_replays, observation, run, states

from sglang_nightjar.policy.base import Observation, Residency, State
from sglang_nightjar.policy.paper import PaperPolicy
from sglang_nightjar.policy.schedule import BinSchedule
from sglang_nightjar.policy.switch_cost import SwitchCost

MAX_GAMMA = 3
LATE_BIN = 1 << 40  # of so small a probability to explore that it does not happen


class FixedCost(SwitchCost):
    """The same seconds for every catch-up."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def __call__(self, lag: float, batch: int) -> float:
        return self.seconds


def taught(goodput: tuple[float, ...], switch_s: float = 0.0, batch_size: int = 1) -> PaperPolicy:
    """A policy that has seen one step of each arm; `goodput` in tokens/s, 0 leaves the arm out."""
    policy = PaperPolicy(MAX_GAMMA, seed=4, switch_cost=FixedCost(switch_s))
    for gamma, rate in enumerate(goodput):
        if rate:
            policy.observe(observation(gamma, (batch_size,), batch_size / rate))
    return policy


def exploit(policy: PaperPolicy, previous: int, batch_size: int = 1) -> int:
    """What a bin that does not explore plays after `previous`."""
    saved = policy.snapshot()
    for context in saved["contexts"]:
        context[1] = [41, LATE_BIN, 1 << 40, 0]  # the next decision opens a bin
    policy.restore(saved | {"previous": previous})
    return policy.decide(State(0.0, batch_size, batch_size * 400, max_lag=50))


# Seconds per token by hand: 10.0, 9.9, 9.615, 9.709 ms.
RATES = (100.0, 101.0, 104.0, 103.0)


@pytest.mark.parametrize(
    ("switch_s", "previous", "chosen"),
    [
        (0.0, 0, 2),
        (0.0004, 0, 2),  # 10.0, 10.3, 9.815, 9.843
        (0.0007, 0, 3),  # 10.0, 10.6, 9.965, 9.942: the deeper chain carries the charge better
        (0.001, 0, 0),  # 10.0, 10.9, 10.115, 10.042
        (0.001, 1, 2),  # speculating already: no charge
        (0.5, 3, 2),
    ],
)
def test_exploits_the_least_latency_with_the_switch_charged_by_gamma(
    switch_s: float, previous: int, chosen: int
) -> None:
    assert exploit(taught(RATES, switch_s), previous) == chosen


def test_an_arm_without_a_sample_is_not_exploited() -> None:
    assert exploit(taught((100.0, 0.0, 0.0, 90.0)), previous=1) == 0
    assert exploit(taught((0.0, 0.0, 0.0, 90.0), switch_s=9.0), previous=0) == 3


def test_goodput_is_the_plain_mean_of_its_own_batch_size() -> None:
    policy = taught((100.0, 90.0), batch_size=4)
    for seconds in (4 / 80.0, 4 / 400.0):
        policy.observe(observation(1, (4,), seconds))  # now (90 + 80 + 400) / 3 = 190
    policy.observe(observation(0, (2,), 2 / 1000.0))  # another context
    (_, _, _, counts, goodput), _ = policy.snapshot()["contexts"]
    assert counts == [1, 3, 0, 0]
    assert goodput == pytest.approx([100.0, 190.0, 0.0, 0.0])
    assert exploit(policy, previous=1, batch_size=4) == 1


def test_goodput_counts_every_committed_token_of_the_whole_step() -> None:
    policy = PaperPolicy(MAX_GAMMA)
    policy.observe(observation(3, (1, 0, 0, 2), 0.1, cut=1, cut_tokens=2, prefill_tokens=900))
    assert policy.snapshot()["contexts"][0][4][3] == pytest.approx((1 + 8 + 2) / 0.1)


def test_a_real_catch_up_teaches_the_switch_cost() -> None:
    policy, cost = PaperPolicy(MAX_GAMMA), SwitchCost()
    policy.observe(observation(2, (4,), 0.5, catchup_tokens=400, catchup_seconds=0.25))
    cost.observe(100, 4, 0.25)
    assert policy.snapshot()["switch_cost"] == cost.snapshot()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_arm_is_locked_within_its_bin(seed: int) -> None:
    policy, schedules = PaperPolicy(5, seed=seed), {8: BinSchedule(), 16: BinSchedule()}
    world = World(0.7, draft_s=0.002, noise=0.3)
    locked: dict[int, int] = {}
    changes = 0
    for index, state in enumerate(states(3000)):
        state = replace(state, batch_size=16 if index % 3 == 0 else 8)
        gamma = policy.decide(state)
        if schedules[state.batch_size].step():
            changes += locked.get(state.batch_size) != gamma
            locked[state.batch_size] = gamma
        assert gamma == locked[state.batch_size]
        policy.observe(world.step(state, gamma))
    assert changes > 20  # it is not that nothing ever changes


def test_explores_once_in_b_bins_and_then_uniformly() -> None:
    best = 2
    state = State(0.0, 1, 400)
    expected = variance = 0.0
    played: Counter[int] = Counter()
    for seed in range(60):
        policy = PaperPolicy(MAX_GAMMA, seed=seed, switch_cost=FixedCost(0.0))
        policy.restore(taught(RATES).snapshot() | {"random": PaperPolicy(1, seed=seed).snapshot()["random"]})
        schedule = BinSchedule()
        for _ in range(2**11 - 1):
            gamma = policy.decide(state)
            if schedule.step():
                chance = schedule.exploration_probability * MAX_GAMMA / (MAX_GAMMA + 1)
                expected, variance = expected + chance, variance + chance * (1.0 - chance)
                played[gamma] += 1
    explored = played.total() - played[best]
    assert abs(explored - expected) < 4.0 * math.sqrt(variance)
    for gamma in (0, 1, 3):
        assert played[gamma] == pytest.approx(expected / MAX_GAMMA, rel=0.15)


def test_the_first_decision_of_a_context_explores() -> None:
    drawn = Counter(PaperPolicy(MAX_GAMMA, seed=seed).decide(State(0.0, 8)) for seed in range(400))
    assert sorted(drawn) == [0, 1, 2, 3] and min(drawn.values()) > 60


def test_settles_on_the_best_arm() -> None:
    world = World(0.8, draft_s=0.0005, noise=0.02)
    late = Counter(run(PaperPolicy(MAX_GAMMA, seed=1), world, states(6000))[4000:])
    assert late[world.best(8, 4000, MAX_GAMMA)] > 1500


@pytest.mark.parametrize("residency", [Residency.EVICTING, Residency.EVICTED, Residency.RELOADING])
def test_does_not_speculate_without_a_resident_draft(residency: Residency) -> None:
    policy = taught((10.0, 20.0, 90.0, 30.0), batch_size=8)
    assert 2 in run(policy, World(0.9, draft_s=0.0001), states(100))
    schedules = [context[1] for context in policy.snapshot()["contexts"]]
    assert set(run(policy, World(0.9, draft_s=0.0001), states(50, residency=residency))) == {0}
    assert [context[1] for context in policy.snapshot()["contexts"]] == schedules  # no bin counts these
    assert policy.snapshot()["previous"] == 0


@pytest.mark.parametrize("before", [0, 1, 150, 777])
def test_a_snapshot_replays(before: int) -> None:
    mixed = [replace(state, batch_size=1 + index // 7 % 9) for index, state in enumerate(states(400))]
    assert_replays(lambda: PaperPolicy(5, seed=6), World(0.7, draft_s=0.002, noise=0.1), states(before), mixed)


def test_decides_by_its_seed() -> None:
    runs = [run(PaperPolicy(5, seed=seed), World(0.7, draft_s=0.002), states(200)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(("field", "seen"), BAD_OBSERVATIONS)
def test_a_bad_observation_is_rejected_and_changes_nothing(field: str, seen: Observation) -> None:
    policy = taught(RATES)
    before = policy.snapshot()
    with pytest.raises(ValueError, match=field):
        policy.observe(seen)
    assert policy.snapshot() == before
