"""`nightjar`: the paper's planner with one estimator shared by all arms and batch sizes.

Kept from the paper (arXiv 2512.22420): batch size as context, blocks and bins, arms locked for
their bin, exploration with probability 1/b, loss = latency per token + the charge for switching
on. Added: what is learned in one cell serves all (`Acceptance`, `StepTime`); exploration is
limited to arms that could still be the best, and ends when they could not; acceptance changes are detected; while off,
probes are paid from a budget; switching between off and on has a dwell and a margin, so that a
load at the crossover does not thrash. The loss of an arm, in seconds per committed token, is `cost_model.py`'s.
"""

import random
from typing import Any

from sglang_nightjar.policy.base import Observation, Residency, State, check_observation
from sglang_nightjar.policy.cost_model import CostModel, mean_lag
from sglang_nightjar.policy.nightjar_settings import NightjarSettings
from sglang_nightjar.policy.random_state import load_random, save_random
from sglang_nightjar.policy.schedule import BinSchedule
from sglang_nightjar.policy.switch_cost import SwitchCost

_FULL_BATCH = 64  # requests
_PATIENCE = 16  # steps for which the draft may read before its first trial; those that opted out lag for ever


class _Context:
    """One class of batch sizes: its schedule, the arm locked for the bin in progress, and the knowledge behind it."""

    __slots__ = ("arm", "revision", "schedule", "tries")

    def __init__(self) -> None:
        self.schedule = BinSchedule()
        self.arm = 0
        self.tries = False  # whether the arm is one that only might be the best
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
        self.model = CostModel(max_gamma, switch_cost)
        self._random = random.Random(seed)
        self._contexts: dict[int, _Context] = {}
        first = min(self.settings.first_gamma, max_gamma)
        # The first steps, last one first: one arm of either side, from which the rest is interpolated.
        self._opening = [gamma for gamma in (first, 0) for _ in range(self.settings.trials)]
        self._catching_up = 0  # steps of them in which the draft was still reading
        self._gamma = 0  # the last one decided
        self._switched_s = float("-inf")  # when off and on last changed
        self._probe_left = 0  # steps left of a probe
        self._probe_wait_s = 0.0  # the time on this side that earns a probe
        self._ask_wait_s = 0.0  # the time on this side before which none could win, as last asked
        self._confirmed = 0  # probes in a row that changed nothing: each makes the next one rarer
        self._revision = 0  # counts what makes locked arms worth a second look
        self._started = False

    # ---- deciding -------------------------------------------------------------------

    def decide(self, state: State) -> int:
        """Gamma of the coming iteration."""
        if state.residency is not Residency.RESIDENT:
            return self._play(0, state)
        if self._opening:
            return self._play(self._open(state), state)
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
            context.arm, context.tries = self._choose(context, state)
        elif context.revision != self._revision:
            context.arm, context.tries = self._best(self._losses(state), state), False
        elif context.tries:
            context.tries = self._goes_on(context, state)
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

    def _open(self, state: State) -> int:
        """The next of the first steps."""
        gamma = self._opening[-1]
        if gamma > 0 and state.batch_size > _FULL_BATCH:
            gamma = 1  # more would cost most in a full batch, and are least likely to pay
            # The draft has not read a single prompt yet, and this many at once take long: that has to be earned.
            cost = self.model.first_reading_s(state)
            if self._gamma == 0 and cost > self.settings.probe_share * (state.now_s - self._switched_s):
                return 0
        if gamma > 0 and self._gamma > 0 and state.max_lag > self.max_gamma and self._catching_up < _PATIENCE:
            self._catching_up += 1  # while the draft reads, not all requests draft, and a step tells little
            return gamma
        self._opening.pop()
        return gamma

    def _choose(self, context: _Context, state: State) -> tuple[int, bool]:
        """The arm of a new bin: the best one, or with probability 1/b another that might be; and which it is."""
        losses = self._losses(state)
        best = self._best(losses, state)
        explores = self._random.random() < context.schedule.exploration_probability
        if not explores or best == 0 or self._gamma == 0:
            # Off and on are compared by estimate and by paid probes; who is about to change sides learns
            # nothing useful by trying more of this one.
            return best, False
        if self.model.step_time.samples(best, state.batch_size) < self.settings.known:
            return best, False  # a trial could not tell yet; where batch sizes change all the time, none ever could
        # T is convex in gamma and E concave, so the loss has one valley: who beats none of its neighbours is in it.
        neighbours = range(max(best - 1, 1), min(best + 1, self.max_gamma) + 1)
        others = [gamma for gamma in neighbours if self._may_beat(gamma, best, losses, state)]
        if not others:
            return best, False
        return min(others, key=lambda gamma: self._hope(gamma, losses[gamma], best, state)), True

    def _goes_on(self, context: _Context, state: State) -> bool:
        """Whether the arm being tried may still turn out better than the one that looks best."""
        losses = self._losses(state)
        best = self._best(losses, state)
        if best > 0 and self._may_beat(context.arm, best, losses, state):
            return True
        context.arm = best
        return False

    def _losses(self, state: State) -> list[float]:
        return [self._loss(gamma, state) for gamma in range(self.max_gamma + 1)]

    def _loss(self, gamma: int, state: State) -> float:
        """Of the coming step at `gamma`, the cost of switching on included where it would."""
        switches_on = gamma > 0 and self._gamma == 0
        return self.model.loss(gamma, state, horizon=self.settings.horizon if switches_on else None)

    def _best(self, losses: list[float], state: State) -> int:
        """The arm of least loss; the other side of off/on only where it gains more than the margin."""
        on = min(range(1, self.max_gamma + 1), key=losses.__getitem__)
        if self._gamma == 0:
            return on if losses[on] < losses[0] * (1.0 - self.settings.margin) else 0
        return 0 if losses[0] < losses[on] * (1.0 - self.settings.margin) else on

    def _may_beat(self, gamma: int, best: int, losses: list[float], state: State) -> bool:
        """Whether `gamma` is better than `best` if its loss is off by a standard error, within the SLO."""
        if gamma == best:
            return False
        limit = self.settings.tpot_slo_s
        if limit is not None and losses[gamma] * state.batch_size > limit >= losses[best] * state.batch_size:
            return False
        return self._hope(gamma, losses[gamma], best, state) < losses[best]

    def _hope(self, gamma: int, loss: float, best: int, state: State) -> float:
        """`loss` of `gamma` less the standard error of its comparison with `best`."""
        error = self.model.step_time.relative_error(gamma, state.batch_size)
        if gamma > best:  # a deeper chain rests on positions less known; a shorter one is known with the best
            error += self.model.acceptance.relative_error(gamma)
        return loss * (1.0 - self.settings.caution * error)

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
            self._probe_wait_s = self._ask_wait_s = 0.0
            self._started = True
        self._gamma = gamma
        return gamma

    # ---- probing the other side of off/on -----------------------------------------------

    def _probe_due(self, state: State) -> bool:
        """Whether the time on this side has earned a probe of the other, and it could show that side to be better."""
        settled_for = state.now_s - self._switched_s
        if self.settings.probe_share == 0.0 or settled_for < max(self.settings.dwell_s, self._ask_wait_s):
            return False
        # Off is tried once for each doubling of the batch: a few steps, shorter than those here.
        new = self._gamma > 0 and not self.model.step_time.tried(0, state.batch_size)
        if settled_for < self._probe_wait_s and not new:
            return False
        arm, steps = self._other_side(state), self.settings.probe_steps
        here, there = (self.model.step_time.predict(g, state.batch_size, state.kv_tokens) for g in (self._gamma, arm))
        if arm == 0:
            losses = self._losses(state)
            least = self.model.step_time.least_plain(state.batch_size) / state.batch_size
            if least >= losses[self._gamma] or not self._may_beat(0, self._gamma, losses, state):
                return self._ask_later(settled_for)
            if new:
                return True
            cost = self.model.switch_cost(steps, state.batch_size)
            cost += steps * max(there - here / self.model.acceptance.expected_tokens(self._gamma), 0.0)
        else:
            if there >= here * (1.0 + arm):
                return self._ask_later(settled_for)  # even if every draft were accepted, it would not pay
            cost = self.model.switch_cost(mean_lag(state), state.batch_size) + steps * max(there - here, 0.0)
        self._probe_wait_s = cost / self.settings.probe_share * (1.0 + self._confirmed)
        return settled_for >= self._probe_wait_s

    def _ask_later(self, settled_for: float) -> bool:
        """No probe is due, nor worth asking for again in every step."""
        self._ask_wait_s = settled_for + self.settings.dwell_s
        return False

    def _probe(self, state: State) -> int:
        self._probe_left = self.settings.probe_steps
        self._probe_wait_s = 0.0
        return self._other_side(state)

    def _other_side(self, state: State) -> int:
        """0 while on; while off, the arm that looks best among those above 0."""
        if self._gamma > 0:
            return 0
        return min(range(1, self.max_gamma + 1), key=lambda gamma: self.model.loss(gamma, state))

    # ---- learning ---------------------------------------------------------------------

    def observe(self, seen: Observation) -> None:
        """Learns acceptance, step time and switch cost from one step."""
        check_observation(seen, self.max_gamma)
        if self.model.learn(seen):
            self._contexts.clear()  # a new regime: every context starts over
            self._confirmed = 0

    def verify_budget(self) -> int | None:
        return None

    # ---- replay -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "random": save_random(self._random),
            "model": self.model.snapshot(),
            "contexts": [[key, c.schedule.snapshot(), c.arm, c.tries, c.revision] for key, c in self._contexts.items()],
            "opening": [*self._opening, self._catching_up],
            "gamma": self._gamma,
            "switched_s": self._switched_s if self._started else None,
            "probe": [self._probe_left, self._probe_wait_s, self._ask_wait_s, self._confirmed, self._revision],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        load_random(self._random, saved["random"])
        self.model.restore(saved["model"])
        self._contexts = {}
        for key, schedule, arm, tries, revision in saved["contexts"]:
            context = self._contexts[int(key)] = _Context()
            context.schedule.restore(schedule)
            context.arm, context.tries, context.revision = int(arm), bool(tries), int(revision)
        *self._opening, self._catching_up = map(int, saved["opening"])
        self._gamma = int(saved["gamma"])
        self._started = saved["switched_s"] is not None
        self._switched_s = float(saved["switched_s"]) if self._started else float("-inf")
        left, wait_s, ask_wait_s, confirmed, revision = saved["probe"]
        self._probe_left, self._probe_wait_s, self._ask_wait_s = int(left), float(wait_s), float(ask_wait_s)
        self._confirmed, self._revision = int(confirmed), int(revision)


def _bucket(batch_size: int) -> int:
    """The context of a batch size: 1, 2, 3, then two classes per doubling. All share what is learned."""
    if batch_size < 4:
        return batch_size
    doublings = batch_size.bit_length()
    return 2 * doublings + ((batch_size >> (doublings - 2)) & 1)
