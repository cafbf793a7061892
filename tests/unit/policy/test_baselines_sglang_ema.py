"""SGLang's accept-length average, its thresholds and its tiers."""

import pytest
from baseline_world import World, assert_replays, observation, run, states

from sglang_nightjar.policy.base import Residency, StepKind
from sglang_nightjar.policy.baselines.sglang_ema import SglangEma, SglangEmaConfig, Tier

ONE_TIER = SglangEmaConfig(tiers=(Tier(1, (0, 1, 3, 7)),), initial_gamma=3)


def feed(policy: SglangEma, accepted: int, steps: int, batch_size: int = 4) -> None:
    """Steps in which every request has `accepted` drafts accepted, or as many as were drafted."""
    for _ in range(steps):
        gamma = policy.decide(states(1, batch_size)[0])
        run_length = min(accepted, gamma)
        policy.observe(observation(gamma, (0,) * run_length + (batch_size,)))


def test_good_drafts_raise_gamma_to_the_largest_candidate_and_bad_ones_turn_it_off() -> None:
    policy = SglangEma(7, ONE_TIER)
    feed(policy, 7, 60)
    assert policy.decide(states(1)[0]) == 7
    seen = set()
    for _ in range(60):
        feed(policy, 0, 1)
        seen.add(policy.decide(states(1)[0]))
    assert 0 in seen and policy.decide(states(1)[0]) <= 1


def test_nothing_changes_in_the_warm_up_nor_between_updates() -> None:
    policy = SglangEma(7, ONE_TIER)
    changed = []
    for step in range(1, 31):
        before = policy.decide(states(1)[0])
        feed(policy, 7, 1)
        if policy.decide(states(1)[0]) != before:
            changed.append(step)
    # 10 steps of warm-up, then every 5; the mean passes 2.5 long before step 15.
    assert changed == [15]


def test_the_average_and_the_thresholds_are_those_of_sglang() -> None:
    # Worked by hand: gamma 3, mean 2 at first, weight 0.5, an update at every step.
    config = SglangEmaConfig(tiers=(Tier(1, (1, 3, 7)),), weight=0.5, warmup_steps=0, update_interval=1)
    policy = SglangEma(7, config)
    policy.observe(observation(3, (0, 0, 1, 1)))  # 2.5 on average: mean 2.25, not above 3 - 0.5
    assert policy.decide(states(1)[0]) == 3
    policy.observe(observation(3, (0, 0, 0, 1)))  # mean 2.625
    assert policy.decide(states(1)[0]) == 7
    policy.observe(observation(7, (0, 0, 0, 1)))  # mean 2.8125: above 3 - 0.5 - 0.25, the hysteresis holds
    assert policy.decide(states(1)[0]) == 7
    policy.observe(observation(7, (0, 0, 1)))  # mean 2.40625, above 2.25
    assert policy.decide(states(1)[0]) == 7
    policy.observe(observation(7, (0, 0, 1)))  # mean 2.203125
    assert policy.decide(states(1)[0]) == 3


def test_after_an_interval_at_gamma_0_the_smallest_candidate_is_tried() -> None:
    policy = SglangEma(7, SglangEmaConfig(tiers=(Tier(1, (0, 1, 3)),), initial_gamma=0))
    feed(policy, 0, 14)
    assert policy.decide(states(1)[0]) == 0
    feed(policy, 0, 1)
    assert policy.decide(states(1)[0]) == 1


@pytest.mark.parametrize(("ceiling", "gamma"), [(0.0, 7), (1.0, 3)])
def test_the_ceiling_caps_gamma_by_the_mean(ceiling: float, gamma: int) -> None:
    config = SglangEmaConfig(tiers=(Tier(1, (1, 3, 7), ceiling=ceiling),), initial_gamma=7, warmup_steps=0)
    policy = SglangEma(7, config)
    feed(policy, 3, 5)  # the mean falls from 6 to 3.98, above 2.25: only a ceiling of 4 lowers gamma
    assert policy.decide(states(1)[0]) == gamma


def test_each_tier_has_its_own_candidates_and_history() -> None:
    policy = SglangEma(7)
    feed(policy, 7, 60, batch_size=4)
    assert policy.decide(states(1, 7)[0]) == 7  # the tier of 1 to 7
    assert policy.decide(states(1, 8)[0]) == 3  # untouched
    assert policy.decide(states(1, 64)[0]) == 0
    padded = SglangEma(7, SglangEmaConfig(graph_batch_sizes=(4, 8, 64)))
    assert padded.decide(states(1, 8)[0]) == 3  # has a graph of its own
    assert padded.decide(states(1, 33)[0]) == 0  # counts as 64
    assert padded.decide(states(1, 100)[0]) == 0  # beyond the graphs: itself


def test_candidates_above_max_gamma_are_dropped() -> None:
    assert SglangEma(2).decide(states(1, 1)[0]) == 1
    assert SglangEma(0).decide(states(1, 1)[0]) == 0


def test_forced_steps_and_idle_requests_do_not_lower_the_average() -> None:
    policy = SglangEma(7, ONE_TIER)
    before = policy.snapshot()
    absent = states(50, residency=Residency.EVICTED)
    assert set(run(policy, World(0.9, draft_s=0.001), absent)) == {0}
    policy.observe(observation(0, (), kind=StepKind.PREFILL))
    policy.observe(observation(3, (4,), drafted=0))
    assert policy.snapshot() == before
    policy.observe(observation(3, (3, 0, 1), drafted=1))  # its one drafting request had 2 accepted
    assert policy.snapshot()["slots"] == [[3, 2.0, 1]]


def test_a_snapshot_replays() -> None:
    assert_replays(lambda: SglangEma(7), World(0.8, draft_s=0.001), states(33, 4), states(60, 4) + states(60, 16))


def test_rejects_a_bad_observation() -> None:
    with pytest.raises(ValueError, match="gamma"):
        SglangEma(7).observe(observation(8, (1,)))
