"""What one forward takes on the emulated device: by a roofline, or by a real server's measured steps."""

from typing import Protocol

from sglang_nightjar.simulate.measured import MeasuredCost
from sglang_nightjar.simulate.roofline import StepCost

_ORDINARY_DRAFT = 2  # tokens per request that the draft reads in a step anyway: the bonus token and one before it


class Forwards(Protocol):
    """Seconds of forwards.

    Attributes:
        cost: of everything else.
    """

    @property
    def cost(self) -> StepCost | MeasuredCost: ...

    def target_s(self, tokens: int, kv_tokens: int, requests: int, *, prompts: bool) -> float:
        """The target's over `tokens` new tokens of `requests`; `prompts`: a prefill. `kv_tokens`: their context."""
        ...

    def draft_s(self, tokens: int, kv_tokens: int, requests: int) -> float:
        """The draft's: of a chain, a catch-up, or over prompts."""
        ...


class RooflineForwards:
    """Every forward is one of `simulate/roofline.py`."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost

    def target_s(self, tokens: int, kv_tokens: int, requests: int, *, prompts: bool) -> float:
        return self.cost.verify_s(tokens, kv_tokens)

    def draft_s(self, tokens: int, kv_tokens: int, requests: int) -> float:
        return self.cost.catchup_s(tokens, kv_tokens)


class MeasuredForwards:
    """Whole steps were measured, so all of a step but its catch-up is charged to the target's forward.

    The measured server's own scheduling is in its steps; ours comes on top, less of it the lower the speed.
    """

    def __init__(self, cost: MeasuredCost) -> None:
        self.cost = cost

    def target_s(self, tokens: int, kv_tokens: int, requests: int, *, prompts: bool) -> float:
        if prompts:
            return self.cost.prefill_s(tokens, kv_tokens, draft=False)
        gamma = -(-tokens // requests) - 1
        return self.cost.step_s(requests, gamma, kv_tokens, verify_tokens=tokens)

    def draft_s(self, tokens: int, kv_tokens: int, requests: int) -> float:
        return self.cost.catchup_s(max(tokens - _ORDINARY_DRAFT * requests, 0), kv_tokens)
