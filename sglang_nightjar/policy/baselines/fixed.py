"""Fixed speculation: `off` and `static:N`."""

from typing import Any

from sglang_nightjar.policy.base import Observation, Residency, State, check_observation


class Fixed:
    """Always the same gamma: `gamma = 0` never speculates, `gamma = N` is ordinary speculative decoding.

    Source: Leviathan et al., arXiv 2211.17192, where the number of drafted tokens is a
    constant of the deployment. It learns nothing, so its snapshot is empty.
    """

    def __init__(self, gamma: int, max_gamma: int) -> None:
        if not 0 <= gamma <= max_gamma:
            raise ValueError(f"gamma is {gamma}; it must be 0 to {max_gamma}")
        self.gamma = gamma
        self.max_gamma = max_gamma

    def decide(self, state: State) -> int:
        return self.gamma if state.residency is Residency.RESIDENT else 0

    def observe(self, seen: Observation) -> None:
        check_observation(seen, self.max_gamma)

    def verify_budget(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        pass
