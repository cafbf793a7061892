"""`Planner`: a policy and, where memory is elastic, a residency planner, asked once per iteration."""

from typing import Any

from sglang_nightjar.policy.base import Decision, Move, Observation, Policy, State
from sglang_nightjar.policy.residency import ResidencyPlanner


class Planner:
    """Turns a `State` into a `Decision`; without `residency` the draft stays where it is."""

    def __init__(self, policy: Policy, residency: ResidencyPlanner | None = None) -> None:
        self.policy = policy
        self.residency = residency

    def decide(self, state: State) -> Decision:
        gamma = self.policy.decide(state)
        budget = self.policy.verify_budget() if gamma else None
        if self.residency is None:
            return Decision(gamma, verify_budget=budget)
        move = self.residency.decide(state, gamma)
        if move is Move.STAY:
            return Decision(gamma, verify_budget=budget)
        return Decision(gamma, move, budget, self.residency.benefit_tokens)

    def observe(self, seen: Observation) -> None:
        self.policy.observe(seen)

    def snapshot(self) -> dict[str, Any]:
        saved = {"policy": self.policy.snapshot()}
        return saved if self.residency is None else {**saved, "residency": self.residency.snapshot()}

    def restore(self, saved: dict[str, Any]) -> None:
        self.policy.restore(saved["policy"])
        if self.residency is not None:
            self.residency.restore(saved["residency"])
