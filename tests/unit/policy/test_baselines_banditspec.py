"""UCBSpec and EXP3Spec on gamma."""

import math
from collections import Counter

import pytest
from baseline_world import World, assert_replays, observation, run, states

from sglang_nightjar.policy.base import Policy, Residency, StepKind
from sglang_nightjar.policy.baselines.banditspec import Exp3Spec, UcbSpec, UcbSpecConfig

GOOD = World(0.9, draft_s=0.0005, noise=0.02)  # best: the largest gamma
BAD = World(0.05, draft_s=0.01, noise=0.02)  # best: 0


@pytest.mark.parametrize("world", [GOOD, BAD])
@pytest.mark.parametrize("make", [lambda: UcbSpec(3), lambda: Exp3Spec(3, seed=5)])
def test_the_best_arm_is_pulled_most(world: World, make: type[Policy]) -> None:
    late = Counter(run(make(), world, states(3000))[1500:])
    assert late.most_common(1)[0][0] == world.best(8, 4000, 3)
    assert late[world.best(8, 4000, 3)] > 750


@pytest.mark.parametrize("make", [lambda: UcbSpec(3), lambda: Exp3Spec(3, seed=5)])
def test_observations_may_come_one_decision_late(make: type[Policy]) -> None:
    policy, late, decided = make(), None, []
    for state in states(3000):
        decided.append(policy.decide(state))
        if late is not None:
            policy.observe(late)
        late = GOOD.step(state, decided[-1])
    assert Counter(decided[1500:])[3] > 750


def test_ucb_pulls_every_arm_once_and_then_by_the_papers_bound() -> None:
    policy = UcbSpec(2, UcbSpecConfig(delta=0.1))
    throughputs = [100.0, 300.0, 200.0]
    for gamma in (0, 1, 2):
        assert policy.decide(states(1, 1)[0]) == gamma
        policy.observe(observation(gamma, (1,), 1.0 / throughputs[gamma]))
    for _ in range(20):  # arm 1 is ahead until its bonus has shrunk below the others'
        pulls, means = policy.snapshot()["pulls"], policy.snapshot()["means"]
        bounds = [
            mean + 150.0 * math.sqrt((1 + n) / n**2 * (1 + 2 * math.log(3 * sum(pulls) ** 2 * math.sqrt(1 + n) / 0.1)))
            for n, mean in zip(pulls, means, strict=True)
        ]
        decided = policy.decide(states(1, 1)[0])
        assert decided == bounds.index(max(bounds))
        policy.observe(observation(decided, (1,), 1.0 / throughputs[decided]))
    assert min(policy.snapshot()["pulls"]) > 1


def test_a_smaller_radius_explores_less() -> None:
    wide = Counter(run(UcbSpec(3), GOOD, states(600)))
    narrow = Counter(run(UcbSpec(3, UcbSpecConfig(radius_scale=0.1)), GOOD, states(600)))
    assert narrow[3] > wide[3]


def test_exp3_divides_the_loss_by_the_probability_of_the_draw() -> None:
    policy = Exp3Spec(1, seed=1)
    first = policy.decide(states(1, 1)[0])  # probability 1/2
    policy.observe(observation(first, (1,), 0.01))  # the largest so far: no loss
    assert policy.snapshot()["losses"] == [0.0, 0.0]
    policy.observe(observation(first, (1,), 0.04))  # a quarter of the largest
    assert policy.snapshot()["losses"][first] == pytest.approx(0.75 / 0.5)


def test_exp3_leaves_out_forced_steps_and_ucb_counts_them() -> None:
    exp3, ucb = Exp3Spec(3, seed=2), UcbSpec(3)
    for policy in (exp3, ucb):
        assert set(run(policy, GOOD, states(30, residency=Residency.EVICTED))) == {0}
    assert exp3.snapshot()["losses"] == [0.0] * 4
    assert ucb.snapshot()["pulls"] == [30, 0, 0, 0]
    assert run(ucb, GOOD, states(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", [Exp3Spec(3), UcbSpec(3)])
def test_prefill_is_no_reward(policy: Policy) -> None:
    gamma = policy.decide(states(1)[0])
    before = policy.snapshot()
    policy.observe(observation(gamma, (8,), 5.0, kind=StepKind.MIXED, prefill_tokens=900))
    policy.observe(observation(0, (), 5.0, kind=StepKind.PREFILL))
    assert policy.snapshot() == before


def test_exp3_draws_by_its_seed() -> None:
    runs = [run(Exp3Spec(3, seed=seed), World(0.7, draft_s=0.002), states(100)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("make", [lambda: UcbSpec(3), lambda: Exp3Spec(3, seed=5)])
def test_a_snapshot_replays(make: type[Policy]) -> None:
    assert_replays(make, World(0.7, draft_s=0.002, noise=0.1), states(150), states(300))


def test_a_snapshot_of_other_arms_is_refused() -> None:
    for policy, other in ((UcbSpec(3), UcbSpec(4)), (Exp3Spec(3), Exp3Spec(4))):
        with pytest.raises(ValueError, match="arms"):
            policy.restore(other.snapshot())


@pytest.mark.parametrize("policy", [Exp3Spec(3), UcbSpec(3)])
def test_rejects_a_bad_observation(policy: Policy) -> None:
    with pytest.raises(ValueError, match="committed"):
        policy.observe(observation(1, (1, 2, 3)))
