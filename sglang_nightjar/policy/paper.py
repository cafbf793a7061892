"""`paper`: the published algorithm, literally, for comparison.

Nightjar (arXiv 2512.22420). Context: the batch size B. Per context, blocks and bins as in
`schedule.py`; a bin explores a uniformly random gamma with probability 1/b, else plays

    argmin over gamma of  1 / g[B, gamma] + [gamma_prev = 0 and gamma > 0] * C_switch(L_max, B) / gamma

with g[B, gamma] the mean goodput of past steps in tokens/s (so the first term is seconds per
token of the whole batch), and C_switch in seconds. The arm is locked for its bin.

Where the paper is silent: an arm without a sample in a context is never exploited (its mean is
unknown), so a context without any sample explores; steps without the draft count in no bin, so the
bin in progress goes on, its arm still locked, when the draft is back.
"""

import random
from typing import Any

from sglang_nightjar.policy.base import Observation, Residency, State, check_observation
from sglang_nightjar.policy.random_state import load_random, save_random
from sglang_nightjar.policy.schedule import BinSchedule
from sglang_nightjar.policy.switch_cost import SwitchCost


class _Context:
    """What one batch size has learned: its schedule, its locked arm, samples and mean goodput of each arm."""

    __slots__ = ("arm", "counts", "goodput", "schedule")

    def __init__(self, arms: int) -> None:
        self.schedule = BinSchedule()
        self.arm = 0
        self.counts = [0] * arms
        self.goodput = [0.0] * arms


class PaperPolicy:
    """The literal algorithm; see the module's docstring. No discounting, no sharing between contexts."""

    def __init__(self, max_gamma: int, seed: int = 0, switch_cost: SwitchCost | None = None) -> None:
        self.max_gamma = max_gamma
        self._random = random.Random(seed)
        self._switch_cost = switch_cost or SwitchCost()
        self._contexts: dict[int, _Context] = {}
        self._previous = 0

    def decide(self, state: State) -> int:
        """Gamma of the coming iteration: the locked arm, or at a bin's start a new choice."""
        if state.residency is not Residency.RESIDENT:
            self._previous = 0
            return 0
        context = self._contexts.get(state.batch_size)
        if context is None:
            context = self._contexts[state.batch_size] = _Context(self.max_gamma + 1)
        if context.schedule.step():
            context.arm = self._choose(context, state)
        self._previous = context.arm
        return context.arm

    def _choose(self, context: _Context, state: State) -> int:
        if self._random.random() < context.schedule.exploration_probability:
            return self._random.randrange(self.max_gamma + 1)
        best, best_loss = -1, float("inf")
        for gamma, goodput in enumerate(context.goodput):
            if goodput <= 0.0:
                continue
            loss = 1.0 / goodput
            if self._previous == 0 and gamma > 0:
                loss += self._switch_cost(state.max_lag, state.batch_size) / gamma
            if loss < best_loss:
                best, best_loss = gamma, loss
        return best if best >= 0 else self._random.randrange(self.max_gamma + 1)

    def observe(self, seen: Observation) -> None:
        """Adds the step's goodput to its cell, and a catch-up to C_switch."""
        check_observation(seen, self.max_gamma)
        if seen.batch_size == 0:
            return
        if seen.catchup_tokens > 0 and seen.catchup_seconds > 0.0:
            self._switch_cost.observe(seen.catchup_tokens / seen.batch_size, seen.batch_size, seen.catchup_seconds)
        context = self._contexts.setdefault(seen.batch_size, _Context(self.max_gamma + 1))
        context.counts[seen.gamma] += 1
        goodput = seen.tokens / seen.seconds
        context.goodput[seen.gamma] += (goodput - context.goodput[seen.gamma]) / context.counts[seen.gamma]

    def verify_budget(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {
            "previous": self._previous,
            "random": save_random(self._random),
            "switch_cost": self._switch_cost.snapshot(),
            "contexts": [
                [batch, c.schedule.snapshot(), c.arm, list(c.counts), list(c.goodput)]
                for batch, c in self._contexts.items()
            ],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        load_random(self._random, saved["random"])
        self._previous = int(saved["previous"])
        self._switch_cost.restore(saved["switch_cost"])
        self._contexts = {}
        for batch, schedule, arm, counts, goodput in saved["contexts"]:
            context = self._contexts[int(batch)] = _Context(self.max_gamma + 1)
            context.schedule.restore(schedule)
            context.arm, context.counts, context.goodput = int(arm), list(counts), list(goodput)
