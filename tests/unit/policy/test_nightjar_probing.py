"""How the default planner changes between off and on: dwell, margin, probes."""

from typing import Any

import pytest
from baseline_world import Played, World, play, run

from sglang_nightjar.policy.base import State
from sglang_nightjar.policy.nightjar import NightjarPolicy
from sglang_nightjar.policy.nightjar_settings import NightjarSettings

MAX_GAMMA = 3
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


def test_off_is_tried_once_at_every_doubling_of_the_batch_at_which_it_could_win() -> None:
    # On pays at each of these, but off is known of 2 requests only. With 8 it cannot win even if its step were as
    # short as with 2; with 40 it could.
    world = World(0.5, draft_s=0.002, token_s=2e-4, noise=0.02)
    policy = make(probe_share=1e-6)  # a budget out of which no probe could be paid
    steps = play(policy, world, [2] * 300 + [8] * 300 + [9] * 300 + [40] * 300)
    off = [sum(step.gamma == 0 for step in steps[begin : begin + 300]) for begin in range(0, 1200, 300)]
    opening = NightjarSettings().trials
    assert off == [opening, 0, 0, policy.settings.probe_steps]


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
