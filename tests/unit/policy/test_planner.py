"""How policy and residency make one decision."""

import json
from typing import Any

import pytest
from baseline_world import World, observation, states

from sglang_nightjar.policy.base import Decision, Move, Observation, Residency, State
from sglang_nightjar.policy.baselines.fixed import Fixed
from sglang_nightjar.policy.baselines.tetris import Tetris
from sglang_nightjar.policy.nightjar import NightjarPolicy
from sglang_nightjar.policy.planner import Planner
from sglang_nightjar.policy.residency import ResidencyCosts, ResidencyPlanner, ResidencySettings

COSTS = ResidencyCosts(10_000, 15_000, pause_s=0.01, reload_s=0.1)
QUICK = ResidencySettings(persist=2, cooldown_s=0.0, settle_s=0.0)


class Worthless:
    """Estimates under which speculation never pays and more requests do."""

    def gain(self, state: State) -> float:
        return -10.0

    def plain_rate(self, batch_size: int, kv_tokens: int) -> float:
        return 40.0 * batch_size

    def larger_rate(self, requests: int, state: State) -> float:
        return self.plain_rate(requests, 0)

    def catchup_s(self, lag: int, batch_size: int) -> float:
        return 0.01


def short(now_s: float) -> State:
    return State(now_s, 64, 9_900, free_slots=100, total_slots=10_000, queue_length=20, queue_blocked=True)


def test_without_residency_the_draft_stays() -> None:
    planner = Planner(Fixed(3, 5))
    assert [planner.decide(short(0.1 * step)) for step in range(100)] == [Decision(3)] * 100
    away = State(0.0, 8, residency=Residency.EVICTED)
    assert planner.decide(away) == Decision(0)


def test_a_budget_belongs_to_a_step_that_drafts() -> None:
    planner = Planner(Tetris(4, 6))
    assert planner.decide(State(0.0, 8)) == Decision(4, verify_budget=24)

    class Stale(Fixed):
        def verify_budget(self) -> int | None:
            return 7

    assert Planner(Stale(0, 5)).decide(State(0.0, 8)) == Decision(0)
    assert Planner(Stale(2, 5)).decide(State(0.0, 8)) == Decision(2, verify_budget=7)


def test_a_move_comes_with_its_benefit_and_other_steps_with_none() -> None:
    residency = ResidencyPlanner(Worthless(), COSTS, QUICK)
    planner = Planner(Fixed(0, 5), residency)
    assert planner.decide(short(0.0)) == Decision(0)
    moved = planner.decide(short(0.1))
    assert moved == Decision(0, Move.EVICT, None, residency.benefit_tokens)
    assert moved.benefit_tokens > 0.0
    assert planner.decide(State(0.2, 64, residency=Residency.EVICTING)) == Decision(0)


def test_observations_reach_the_policy() -> None:
    class Listening(Fixed):
        heard: list[Observation] = []

        def observe(self, seen: Observation) -> None:
            self.heard.append(seen)

    seen = observation(2, (4,))
    policy = Listening(2, 5)
    Planner(policy, ResidencyPlanner(Worthless(), COSTS)).observe(seen)
    assert policy.heard == [seen]
    with pytest.raises(ValueError, match="gamma"):
        Planner(Fixed(2, 5)).observe(observation(6, (4,)))


@pytest.mark.parametrize("elastic", [False, True])
def test_a_restored_planner_decides_the_same(elastic: bool) -> None:
    def make() -> Planner:
        policy = NightjarPolicy(3, seed=2)
        return Planner(policy, ResidencyPlanner(Worthless(), COSTS, QUICK) if elastic else None)

    def play(planner: Planner, world: World, moments: list[State]) -> list[Decision]:
        decided = []
        for state in moments:
            decided.append(planner.decide(state))
            planner.observe(world.step(state, decided[-1].gamma))
        return decided

    moments = states(40) + [short(2.0 + 0.1 * step) for step in range(41)]
    planner, restored = make(), make()
    play(planner, World(0.1, draft_s=0.01), moments)
    saved: dict[str, Any] = json.loads(json.dumps(planner.snapshot()))
    assert ("residency" in saved) == elastic
    restored.restore(saved)
    assert restored.snapshot() == planner.snapshot()
    later = [short(7.0 + 0.1 * step) for step in range(60)]
    decided = play(planner, World(0.1, draft_s=0.01), later)
    assert play(restored, World(0.1, draft_s=0.01), later) == decided
    assert any(decision.move is Move.EVICT for decision in decided) == elastic
