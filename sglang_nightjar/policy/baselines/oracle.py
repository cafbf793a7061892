"""The best gamma by known costs: the simulator's yardstick."""

from collections.abc import Callable
from typing import Any

from sglang_nightjar.policy.base import Observation, Residency, State, check_observation

# (state, gamma, previous gamma) -> expected seconds per committed token.
Cost = Callable[[State, int, int], float]


class Oracle:
    """Picks `argmin over gamma of cost(state, gamma, previous gamma)`, ties to the smaller gamma.

    Simulator only: no server knows `cost`. It is greedy, so where switching has a price it
    is the best single step, not the best plan. The previous gamma is the one it decided
    last (0 before the first decision and after a decision with the draft absent).
    """

    def __init__(self, max_gamma: int, cost: Cost) -> None:
        if max_gamma < 0:
            raise ValueError(f"max_gamma is {max_gamma}; it must not be negative")
        self.max_gamma = max_gamma
        self._cost = cost
        self._previous = 0

    def decide(self, state: State) -> int:
        best = 0
        if state.residency is Residency.RESIDENT:
            least = self._cost(state, 0, self._previous)
            for gamma in range(1, self.max_gamma + 1):
                seconds_per_token = self._cost(state, gamma, self._previous)
                if seconds_per_token < least:
                    best, least = gamma, seconds_per_token
        self._previous = best
        return best

    def observe(self, seen: Observation) -> None:
        check_observation(seen, self.max_gamma)

    def verify_budget(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {"previous": self._previous}

    def restore(self, saved: dict[str, Any]) -> None:
        self._previous = int(saved["previous"])
