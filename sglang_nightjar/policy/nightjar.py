"""`nightjar`: the paper's planner with one estimator shared by all arms and batch sizes.

Kept from the paper (arXiv 2512.22420): batch size as context, blocks and bins, arms locked for
their bin, exploration with probability 1/b, loss = latency per token + the charge for switching
on. Added: what is learned in one cell serves all (`Acceptance`, `StepTime`); exploration is
limited to arms that could still be the best; acceptance changes are detected; while off,
probes are paid from a budget; switching between off and on has a dwell and a margin, so that a
load at the crossover does not thrash. With the step time T in seconds, batch size B,

    loss(gamma) = T(gamma, B, KV) / (B * E[tokens | gamma])
                  + [off and gamma > 0] * C_switch(lag, B) / (horizon * B * E[tokens | gamma])
                  + [gamma > 0] * reading

in seconds per committed token. `horizon` (steps) is for how long the catch-up is of use. `reading`: while speculation
is on the draft reads new prompts too, which no decode step shows; C_switch says how long that takes.
"""

import random
from typing import Any

from sglang_nightjar.policy.acceptance import Acceptance, drafting_requests
from sglang_nightjar.policy.base import Observation, Residency, State, check_observation
from sglang_nightjar.policy.nightjar_settings import NightjarSettings
from sglang_nightjar.policy.random_state import load_random, save_random
from sglang_nightjar.policy.schedule import BinSchedule
from sglang_nightjar.policy.step_time import StepTime
from sglang_nightjar.policy.switch_cost import SwitchCost

_FULL_BATCH = 64  # requests
_KEEP_LOAD = 0.9975  # of the prompts and outputs counted, per step: about 400 are remembered
_OUTPUT = 128.0  # tokens a running request is taken to write yet: those that have just come have written nothing


class _Context:
    """One class of batch sizes: its schedule, the arm locked for the bin in progress, and the knowledge behind it."""

    __slots__ = ("arm", "revision", "schedule")

    def __init__(self) -> None:
        self.schedule = BinSchedule()
        self.arm = 0
        self.revision = 0


class NightjarPolicy:
    """The default planner; see the module's docstring."""

    def __init__(
        self,
        max_gamma: int,
        seed: int = 0,
        switch_cost: SwitchCost | None = None,
        settings: NightjarSettings | None = None,
    ) -> None:
        self.max_gamma = max_gamma
        self.settings = settings or NightjarSettings()
        self.switch_cost = switch_cost or SwitchCost()
        self.acceptance = Acceptance(max_gamma)
        self.step_time = StepTime(max_gamma)
        self._random = random.Random(seed)
        self._contexts: dict[int, _Context] = {}
        first = min(self.settings.first_gamma, max_gamma)
        # The first steps, last one first: one arm of either side, from which the rest is interpolated.
        self._opening = [gamma for gamma in (first, 0) for _ in range(self.settings.trials)]
        self._gamma = 0  # the last one decided
        self._switched_s = float("-inf")  # when off and on last changed
        self._probe_left = 0  # steps left of a probe
        self._probe_wait_s = 0.0  # the earliest time on this side that a probe is worth considering
        self._confirmed = 0  # probes in a row that changed nothing: each makes the next one rarer
        self._revision = 0  # counts what makes locked arms worth a second look
        self._started = False
        self._reading_s = self._written = 0.0  # lately: what the draft's reading of prompts takes; tokens committed

    # ---- deciding -------------------------------------------------------------------

    def decide(self, state: State) -> int:
        """Gamma of the coming iteration."""
        if state.residency is not Residency.RESIDENT:
            return self._play(0, state)
        if self._opening:
            gamma = self._opening.pop()
            # A full batch is tried with one draft: more would cost most there, and are least likely to pay.
            return self._play(min(gamma, 1) if state.batch_size > _FULL_BATCH else gamma, state)
        probed = self._probe_left == 1
        if self._probe_left > 0:
            self._probe_left -= 1
            if not probed:
                return self._play(self._gamma, state)
            self._revision += 1  # what the probe taught may change every choice
            before = self._gamma > 0
        context = self._contexts.get(_bucket(state.batch_size))
        if context is None:
            context = self._contexts[_bucket(state.batch_size)] = _Context()
        if context.schedule.step(self.settings.longest_bin):
            context.arm = self._choose(context, state)
            context.revision = self._revision
        elif context.revision != self._revision:
            context.arm = self._best(self._losses(state), state)
            context.revision = self._revision
        gamma = self._settle(context.arm, state, free=probed)
        if probed:
            self._confirmed = self._confirmed + 1 if (gamma > 0) != before else 0
        return self._play(gamma, state)

    def reads_prompts(self, state: State) -> bool:
        """Whether it would still speculate in `state`, in which the requests to be prefilled decode too."""
        if self._gamma == 0 or self._opening:
            return True  # no draft forward anyway, or a trial that needs the draft
        losses = self._losses(state)
        if self._best(losses, state) > 0:
            return True
        return state.now_s - self._switched_s < self.settings.dwell_s and not self._urgent(0, losses)

    def _choose(self, context: _Context, state: State) -> int:
        """The arm of a new bin: the best one, or with probability 1/b another that might be."""
        losses = self._losses(state)
        best = self._best(losses, state)
        explores = self._random.random() < context.schedule.exploration_probability
        if not explores or (best > 0) != (self._gamma > 0):
            return best  # who is about to leave this side of off/on learns nothing useful by trying more of it
        plausible = [g for g in range(self.max_gamma + 1) if g != best and self._plausible(g, losses, best, state)]
        if not plausible:
            return best
        # The least known of them teaches most.
        return min(plausible, key=lambda gamma: (self.step_time.samples(gamma, state.batch_size), gamma))

    def _best(self, losses: list[float], state: State) -> int:
        """The arm of least loss; the other side of off/on only where it gains more than the margin."""
        on = min(range(1, self.max_gamma + 1), key=losses.__getitem__)
        if self._gamma == 0:
            return on if losses[on] < losses[0] * (1.0 - self.settings.margin) else 0
        return 0 if losses[0] < losses[on] * (1.0 - self.settings.margin) else on

    def _plausible(self, gamma: int, losses: list[float], best: int, state: State) -> bool:
        """Whether `gamma` may still turn out better than `best`, and keeps the SLO where that matters."""
        if (gamma == 0) != (self._gamma == 0):
            return False  # off and on are compared by estimate and by paid probes, not by exploring
        return self._could_win(gamma, losses[gamma], best, losses[best], state)

    def _could_win(self, gamma: int, loss: float, best: int, least: float, state: State) -> bool:
        """Whether `gamma` is better than `best` if its `loss` is off by a standard error, within the SLO."""
        limit = self.settings.tpot_slo_s
        if limit is not None and loss * state.batch_size > limit >= least * state.batch_size:
            return False
        error = self.step_time.relative_error(gamma, state.batch_size)
        if gamma > best:  # a deeper chain rests on positions less known; a shorter one is known with the best
            error += self.acceptance.relative_error(gamma)
        return loss * (1.0 - self.settings.caution * error) < least

    def _settle(self, arm: int, state: State, free: bool) -> int:
        """Holds the present side of off/on for the dwell (`free`: not so), and starts a probe when one is due."""
        if (arm > 0) == (self._gamma > 0):
            return self._probe(state) if self._probe_due(state) else arm
        if free or state.now_s - self._switched_s >= self.settings.dwell_s:
            return arm
        losses = self._losses(state)
        return arm if self._urgent(arm, losses) else self._held(losses)

    def _held(self, losses: list[float]) -> int:
        """The best arm of the present side of off/on."""
        return 0 if self._gamma == 0 else min(range(1, self.max_gamma + 1), key=losses.__getitem__)

    def _urgent(self, arm: int, losses: list[float]) -> bool:
        """Whether `arm`, of the other side, is so much better that the dwell is cut short."""
        return losses[arm] < losses[self._held(losses)] * (1.0 - self.settings.urgent)

    def _play(self, gamma: int, state: State) -> int:
        if (gamma > 0) != (self._gamma > 0) or not self._started:
            self._switched_s = state.now_s
            self._probe_wait_s = 0.0
            self._started = True
        self._gamma = gamma
        return gamma

    # ---- probing the other side of off/on -----------------------------------------------

    def _probe_due(self, state: State) -> bool:
        """Whether the time on this side has earned a probe of the other, and it could show that side to be better."""
        settled_for = state.now_s - self._switched_s
        if self.settings.probe_share == 0.0 or settled_for < self.settings.dwell_s:
            return False
        # Off is tried once for each doubling of the batch: a few steps, shorter than those here.
        new = self._gamma > 0 and not self.step_time.tried(0, state.batch_size)
        if settled_for < self._probe_wait_s and not new:
            return False
        arm, steps = self._other_side(state), self.settings.probe_steps
        here, there = (self.step_time.predict(g, state.batch_size, state.kv_tokens) for g in (self._gamma, arm))
        if arm == 0:
            if not self._could_win(0, self.loss(0, state), self._gamma, self.loss(self._gamma, state), state):
                return self._ask_later(settled_for)
            if new:
                return True
            cost = self.switch_cost(steps, state.batch_size)
            cost += steps * max(there - here / self.acceptance.expected_tokens(self._gamma), 0.0)
        else:
            if there >= here * (1.0 + arm):
                return self._ask_later(settled_for)  # even if every draft were accepted, it would not pay
            cost = self.switch_cost(_lag(state), state.batch_size) + steps * max(there - here, 0.0)
        self._probe_wait_s = cost / self.settings.probe_share * (1.0 + self._confirmed)
        return settled_for >= self._probe_wait_s

    def _ask_later(self, settled_for: float) -> bool:
        """No probe is due, nor worth asking for again in every step."""
        self._probe_wait_s = settled_for + self.settings.dwell_s
        return False

    def _probe(self, state: State) -> int:
        self._probe_left = self.settings.probe_steps
        self._probe_wait_s = 0.0
        return self._other_side(state)

    def _other_side(self, state: State) -> int:
        """0 while on; while off, the arm that looks best among those above 0."""
        if self._gamma > 0:
            return 0
        return min(range(1, self.max_gamma + 1), key=lambda gamma: self.loss(gamma, state, free=True))

    # ---- the loss ---------------------------------------------------------------------

    def _losses(self, state: State) -> list[float]:
        return [self.loss(gamma, state) for gamma in range(self.max_gamma + 1)]

    def loss(self, gamma: int, state: State, *, free: bool = False) -> float:
        """Seconds per committed token of the batch at `gamma`; `free`: without the cost of switching on."""
        seconds = self.step_time.predict(gamma, state.batch_size, state.kv_tokens)
        if gamma > 0 and self._gamma == 0 and not free:
            seconds += self.switch_cost(_lag(state), state.batch_size) / self.settings.horizon
        reading = self._reading_s / (self._written + _OUTPUT * state.batch_size) if gamma > 0 else 0.0
        return seconds / (state.batch_size * self.acceptance.expected_tokens(gamma)) + reading

    def gain(self, state: State) -> float:
        """Tokens/s that the best gamma above 0 would add at this load; negative where off is better."""
        on = min(self.loss(gamma, state, free=True) for gamma in range(1, self.max_gamma + 1))
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

    # ---- learning ---------------------------------------------------------------------

    def observe(self, seen: Observation) -> None:
        """Learns acceptance, step time and switch cost from one step."""
        check_observation(seen, self.max_gamma)
        self._reading_s = self._reading_s * _KEEP_LOAD + self.switch_cost(seen.prefill_tokens, 1)
        self._written = self._written * _KEEP_LOAD + seen.tokens
        batch = seen.batch_size
        if batch == 0:
            return
        if seen.catchup_tokens > 0 and seen.catchup_seconds > 0.0:
            self.switch_cost.observe(seen.catchup_tokens / batch, batch, seen.catchup_seconds)
        if seen.gamma > 0 and self.acceptance.observe(seen.gamma, drafting_requests(seen)):
            self._contexts.clear()  # a new regime: every context starts over
            self._confirmed = 0
        self.step_time.learn(seen)

    def verify_budget(self) -> int | None:
        return None

    # ---- replay -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "random": save_random(self._random),
            "acceptance": self.acceptance.snapshot(),
            "step_time": self.step_time.snapshot(),
            "switch_cost": self.switch_cost.snapshot(),
            "contexts": [[key, c.schedule.snapshot(), c.arm, c.revision] for key, c in self._contexts.items()],
            "opening": list(self._opening),
            "gamma": self._gamma,
            "switched_s": self._switched_s if self._started else None,
            "load": [self._reading_s, self._written],
            "probe": [self._probe_left, self._probe_wait_s, self._confirmed, self._revision],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        load_random(self._random, saved["random"])
        self.acceptance.restore(saved["acceptance"])
        self.step_time.restore(saved["step_time"])
        self.switch_cost.restore(saved["switch_cost"])
        self._contexts = {}
        for key, schedule, arm, revision in saved["contexts"]:
            context = self._contexts[int(key)] = _Context()
            context.schedule.restore(schedule)
            context.arm, context.revision = int(arm), int(revision)
        self._opening = [int(gamma) for gamma in saved["opening"]]
        self._gamma = int(saved["gamma"])
        self._started = saved["switched_s"] is not None
        self._switched_s = float(saved["switched_s"]) if self._started else float("-inf")
        self._reading_s, self._written = map(float, saved["load"])
        left, wait_s, confirmed, revision = saved["probe"]
        self._probe_left, self._probe_wait_s = int(left), float(wait_s)
        self._confirmed, self._revision = int(confirmed), int(revision)


def _lag(state: State) -> float:
    """Tokens per request to catch up: the largest lag, but no more than there is on average."""
    return min(float(state.max_lag), state.kv_tokens / state.batch_size) if state.kv_tokens else float(state.max_lag)


def _bucket(batch_size: int) -> int:
    """The context of a batch size: 1, 2, 3, then two classes per doubling. All share what is learned."""
    if batch_size < 4:
        return batch_size
    doublings = batch_size.bit_length()
    return 2 * doublings + ((batch_size >> (doublings - 2)) & 1)
