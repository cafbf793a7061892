"""`Planner`: a policy and, where memory is elastic, a residency planner, asked once per iteration."""

from typing import Any

from sglang_nightjar.policy.base import Decision, Move, Observation, Policy, PromptReader, State
from sglang_nightjar.policy.residency import ResidencyPlanner


class Planner:
    """Turns a `State` into a `Decision`; without `residency` the draft stays where it is."""

    def __init__(self, policy: Policy, residency: ResidencyPlanner | None = None) -> None:
        self.policy = policy
        self.residency = residency
        self._prompts = policy if isinstance(policy, PromptReader) else None

    @property
    def judges_prompts(self) -> bool:
        """Whether `reads_prompts` may say no."""
        return self._prompts is not None

    def reads_prompts(self, state: State) -> bool:
        """Whether the draft shall read the prompts after whose prefill the server is in `state`; see `PromptReader`."""
        return self._prompts is None or self._prompts.reads_prompts(state)

    def decide(self, state: State) -> Decision:
        gamma = self.policy.decide(state)
        budget = self.policy.verify_budget() if gamma else None
        if self.residency is None:
            return Decision(gamma, verify_budget=budget)
        move = self.residency.decide(state)
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
