"""TETRIS: draft more than is verified, and verify the drafts most likely to be accepted."""

from dataclasses import dataclass
from typing import Any

from sglang_nightjar.policy.base import Observation, Residency, State, check_observation


@dataclass(frozen=True, slots=True)
class TetrisConfig:
    """Settings of `Tetris`.

    Attributes:
        extra: tokens drafted per request beyond the verification's share of `gamma - extra`.
            The authors' experiments use 1 to 3.
        least_batch: running requests from which drafts are selected; below it nothing can
            be traded between requests, so `gamma - extra` are drafted and all verified.
        capacity: draft tokens the server can verify in a step, whatever the batch; None
            scales with the batch.
    """

    extra: int = 1
    least_batch: int = 2
    capacity: int | None = None


class Tetris:
    """Drafts `gamma` tokens per request and verifies a budget of them over the whole batch.

    Source: TETRIS, arXiv 2502.15197, and the authors' vLLM code. With B running requests,
    the budget in draft tokens per step is

        budget = (gamma - extra) * B,  or  min(capacity, gamma * B) with a fixed capacity.

    Within it, the drafts with the largest cumulative draft probability (the product of the
    draft's own probabilities along the request's chain) are verified. As that product
    never grows along a chain, what is chosen is always a prefix per request, and choosing
    greedily is optimal for the drafts expected to be accepted if the draft's probability
    stands for the acceptance rate.

    Deviations: the selection needs the drafts' probabilities, so the engine makes it; the
    policy gives only gamma and the budget. The paper leaves gamma constant, so nothing is
    learned.
    """

    def __init__(self, gamma: int, max_gamma: int, config: TetrisConfig | None = None) -> None:
        config = config or TetrisConfig()
        if not 0 < gamma <= max_gamma:
            raise ValueError(f"gamma is {gamma}; it must be 1 to {max_gamma}")
        if not 0 <= config.extra < gamma:
            raise ValueError(f"extra is {config.extra}; it must be 0 to {gamma - 1}, below gamma")
        if config.capacity is not None and config.capacity < 1:
            raise ValueError(f"capacity is {config.capacity}; it must be at least 1, or None to follow the batch")
        self.gamma = gamma
        self.max_gamma = max_gamma
        self.config = config
        self._budget: int | None = None

    def decide(self, state: State) -> int:
        self._budget = None
        if state.residency is not Residency.RESIDENT:
            return 0
        verified = self.gamma - self.config.extra
        if state.batch_size < self.config.least_batch:
            return verified
        if self.config.capacity is None:
            self._budget = verified * state.batch_size
        else:
            self._budget = min(self.config.capacity, self.gamma * state.batch_size)
        return self.gamma

    def observe(self, seen: Observation) -> None:
        check_observation(seen, self.max_gamma)

    def verify_budget(self) -> int | None:
        return self._budget

    def snapshot(self) -> dict[str, Any]:
        return {"budget": self._budget}

    def restore(self, saved: dict[str, Any]) -> None:
        budget = saved["budget"]
        self._budget = None if budget is None else int(budget)
