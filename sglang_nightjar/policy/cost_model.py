"""What a token costs at any gamma and load, and what speculating or more memory would bring; learned from every step.

Acceptance (`acceptance.py`), step time (`step_time.py`) and the cost of switching on (`switch_cost.py`) put together.
With the step time T in seconds and batch size B,

    loss(gamma) = T(gamma, B, KV) / (B * E[tokens | gamma])
                  + [switching on] * C_switch(lag, B) / (horizon * B * E[tokens | gamma])
                  + [gamma > 0] * reading

in seconds per committed token. `horizon` (steps) is for how long the catch-up is of use. `reading`: while speculation
is on the draft reads new prompts too, which no decode step shows; C_switch says how long that takes.
"""

from typing import Any

from sglang_nightjar.policy.acceptance import Acceptance, drafting_requests
from sglang_nightjar.policy.base import Observation, State, StepKind
from sglang_nightjar.policy.step_time import StepTime
from sglang_nightjar.policy.switch_cost import SwitchCost

_KEEP_LOAD = 0.9975  # of the prompts and outputs counted, per step: about 400 are remembered
_DRAFT_SHARE = 0.1  # a draft is taken to read in this share of the target's time, until it has read (as in `StepTime`)
_OUTPUT = 128.0  # tokens a running request is taken to write yet: those that have just come have written nothing


class CostModel:
    """Estimates for one pair of models on one server; see the module's docstring."""

    def __init__(self, max_gamma: int, switch_cost: SwitchCost | None = None) -> None:
        self._gammas = range(1, max_gamma + 1)
        self.acceptance = Acceptance(max_gamma)
        self.step_time = StepTime(max_gamma)
        self.switch_cost = switch_cost or SwitchCost()
        self._prefill_s = 0.0  # per prompt token, lately
        self._reading_s = self._written = 0.0  # lately: what the draft's reading of prompts takes; tokens committed

    def loss(self, gamma: int, state: State, *, horizon: int | None = None) -> float:
        """Seconds per committed token of the batch at `gamma`.

        `horizon`: where the draft has to catch up first, the steps over which that is spread; None where it has not.
        """
        seconds = self.step_time.predict(gamma, state.batch_size, state.kv_tokens)
        if horizon is not None:
            seconds += self.switch_cost(mean_lag(state), state.batch_size) / horizon
        reading = self._reading_s / (self._written + _OUTPUT * state.batch_size) if gamma > 0 else 0.0
        return seconds / (state.batch_size * self.acceptance.expected_tokens(gamma)) + reading

    def gain(self, state: State) -> float:
        """Tokens/s that the best gamma above 0 would add at this load; negative where off is better."""
        on = min(self.loss(gamma, state) for gamma in self._gammas)
        return 1.0 / on - 1.0 / self.loss(0, state)

    def plain_rate(self, batch_size: int, kv_tokens: int) -> float:
        """Tokens/s of decoding without speculation."""
        return batch_size / self.step_time.predict(0, batch_size, kv_tokens)

    def larger_rate(self, requests: int, state: State) -> float:
        """Tokens/s without speculation, at the least, of `requests` running instead of the present ones.

        What a larger batch takes is seldom known before memory allows one. But a verification also puts more
        tokens through the target, so each further request costs no more than a drafted token does at this load,
        in which the draft's own forward is counted too; nor more than the regression says, where verifications
        have shown it what so many tokens take.
        """
        batch = state.batch_size
        plain, drafted = (self.step_time.predict(gamma, batch, state.kv_tokens) for gamma in (0, 1))
        error = 1.0 + 2.0 * self.step_time.relative_error(1, batch)
        added = (drafted * error - plain) * (requests / batch - 1.0)
        if self.step_time.tried(1, batch):
            added = min(added, self.step_time.growth(batch, requests, state.kv_tokens) * error)
        return requests / (plain + max(added, 0.0))

    def catchup_s(self, lag: int, batch_size: int) -> float:
        """Seconds until the draft has read `lag` tokens of each request."""
        return self.switch_cost(lag, batch_size)

    def first_reading_s(self, state: State) -> float:
        """Seconds until a draft that has never read has caught up: no less than the target's own reading suggests."""
        lag = mean_lag(state)
        own = _DRAFT_SHARE * self._prefill_s * lag * state.batch_size
        return max(self.switch_cost(lag, state.batch_size), own)

    def learn(self, seen: Observation) -> bool:
        """Learns one step; whether it shows that acceptance is not what it was."""
        if seen.kind is StepKind.PREFILL and seen.prefill_tokens > 0:
            spent = seen.seconds / seen.prefill_tokens
            self._prefill_s += 0.1 * (spent - self._prefill_s) if self._prefill_s else spent
        self._reading_s = self._reading_s * _KEEP_LOAD + self.switch_cost(seen.prefill_tokens, 1)
        self._written = self._written * _KEEP_LOAD + seen.tokens
        batch = seen.batch_size
        if batch == 0:
            return False
        if seen.catchup_tokens > 0 and seen.catchup_seconds > 0.0:
            self.switch_cost.observe(seen.catchup_tokens / batch, batch, seen.catchup_seconds)
        self.step_time.learn(seen)
        return seen.gamma > 0 and self.acceptance.observe(seen.gamma, drafting_requests(seen))

    def snapshot(self) -> dict[str, Any]:
        return {
            "acceptance": self.acceptance.snapshot(),
            "step_time": self.step_time.snapshot(),
            "switch_cost": self.switch_cost.snapshot(),
            "load": [self._reading_s, self._written, self._prefill_s],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self.acceptance.restore(saved["acceptance"])
        self.step_time.restore(saved["step_time"])
        self.switch_cost.restore(saved["switch_cost"])
        self._reading_s, self._written, self._prefill_s = map(float, saved["load"])


def mean_lag(state: State) -> float:
    """Tokens per request to catch up: the largest lag, but no more than there is on average."""
    return min(float(state.max_lag), state.kv_tokens / state.batch_size) if state.kv_tokens else float(state.max_lag)
