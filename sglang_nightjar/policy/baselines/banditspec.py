"""BanditSpec: gamma as the arm of a bandit that does not look at the batch."""

import math
import random
from dataclasses import dataclass
from typing import Any

from sglang_nightjar.policy.base import Observation, Residency, State, StepKind, check_observation
from sglang_nightjar.policy.random_state import load_random, save_random


@dataclass(frozen=True, slots=True)
class UcbSpecConfig:
    """Settings of `UcbSpec`.

    Attributes:
        delta: the confidence bounds fail with a probability of this order.
        radius_scale: multiplies the confidence radius; 1 is the paper's, less explores less.
    """

    delta: float = 0.05
    radius_scale: float = 1.0


def _throughput(seen: Observation) -> float | None:
    """Tokens per second of a step of decoding only; None for a step with a prefill in it."""
    if seen.kind is not StepKind.DECODE or seen.batch_size == 0:
        return None
    return seen.tokens / seen.seconds


class UcbSpec:
    """UCBSpec over gamma = 0 .. max_gamma: the arm with the largest upper confidence bound.

    Source: BanditSpec, arXiv 2505.15141, algorithm 4. There a round is one draft and
    verification of one prompt, the reward Y is its number of tokens in 1 .. L+1, and the
    regret is in stopping time: rounds until the end of the text, against the best fixed
    arm. With K arms, n pulls and mean m of an arm, and t rounds so far:

        bound = m + (L / 2) * sqrt((1 + n) / n^2 * (1 + 2 ln(K t^2 sqrt(1 + n) / delta)))

    The first K rounds pull every arm once.

    Here a round is a step of the whole batch. Rounds of different gamma differ in length,
    so stopping time in rounds would make the largest gamma the best; as in the paper's
    section 6.2 on speculation lengths, the reward is throughput, in tokens per second of
    the batch, which makes it stopping time in seconds. L / 2 is half the width of the
    reward's range; throughput has no known one, so half the largest throughput seen stands
    for it. That bound is wide: after 200 of 1000 pulls an arm's bonus is still about 0.2 of
    the range. The authors' published code hardly explores after two pulls of each arm;
    `radius_scale` below 1 comes closer to it.

    Deviations: the paper starts anew with each prompt; a server has no such boundary, so
    the history never ends. Batches of different sizes share one mean per arm, which is the
    method's known weakness and is kept. Steps with a prefill in them are not rewards. A
    step forced to gamma 0 is a fair sample of that arm and counts.
    """

    def __init__(self, max_gamma: int, config: UcbSpecConfig | None = None) -> None:
        self.max_gamma = max_gamma
        self.config = config or UcbSpecConfig()
        if max_gamma < 0:
            raise ValueError(f"max_gamma is {max_gamma}; it must not be negative")
        if not 0.0 < self.config.delta < 1.0:
            raise ValueError(f"delta is {self.config.delta}; it must be between 0 and 1")
        self._round = 0
        self._pulls = [0] * (max_gamma + 1)
        self._means = [0.0] * (max_gamma + 1)  # tokens per second
        self._largest = 0.0  # tokens per second

    def decide(self, state: State) -> int:
        if state.residency is not Residency.RESIDENT:
            return 0
        if self._round <= self.max_gamma:
            self._round += 1
            return self._round - 1
        rounds = sum(self._pulls)
        half_range = 0.5 * self._largest * self.config.radius_scale
        factor = len(self._pulls) * rounds * rounds / self.config.delta
        best, highest = 0, -1.0
        for gamma, pulls in enumerate(self._pulls):
            if pulls == 0:  # its first round was a mixed step, or has not been observed yet
                return gamma
            spread = (1 + pulls) / (pulls * pulls)
            radius = half_range * math.sqrt(spread * (1.0 + 2.0 * math.log(factor * math.sqrt(1 + pulls))))
            if self._means[gamma] + radius > highest:
                best, highest = gamma, self._means[gamma] + radius
        return best

    def observe(self, seen: Observation) -> None:
        check_observation(seen, self.max_gamma)
        reward = _throughput(seen)
        if reward is None:
            return
        self._pulls[seen.gamma] += 1
        self._means[seen.gamma] += (reward - self._means[seen.gamma]) / self._pulls[seen.gamma]
        self._largest = max(self._largest, reward)

    def verify_budget(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {
            "round": self._round,
            "pulls": list(self._pulls),
            "means": list(self._means),
            "largest": self._largest,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        if len(saved["pulls"]) != self.max_gamma + 1:
            raise ValueError(f"snapshot has {len(saved['pulls'])} arms; this policy has {self.max_gamma + 1}")
        self._round = int(saved["round"])
        self._pulls = [int(pulls) for pulls in saved["pulls"]]
        self._means = [float(mean) for mean in saved["means"]]
        self._largest = float(saved["largest"])


class Exp3Spec:
    """EXP3Spec over gamma = 0 .. max_gamma: arms drawn by exponential weights of their losses.

    Source: BanditSpec, arXiv 2505.15141, algorithm 5, for rewards that may change in any
    way. With K arms, in round t, arm i of probability p and reward Y in 1 .. L+1:

        loss estimate Z_i = (L + 1 - Y) / (L * p_i) if i was pulled, else 0
        p_i ~ exp(-eta * sum of Z_i),  eta = sqrt(ln K / (t K))

    Here Y is throughput as in `UcbSpec`, and (L + 1 - Y) / L becomes the share of the
    largest throughput seen so far by which the step fell short, in 0 .. 1.

    Deviations: those of `UcbSpec`, except that a step forced to gamma 0 is left out: it was
    drawn from no distribution. An observation may arrive one decision late; the loss is
    divided by the probability with which that arm was drawn last.
    """

    def __init__(self, max_gamma: int, seed: int = 0) -> None:
        if max_gamma < 0:
            raise ValueError(f"max_gamma is {max_gamma}; it must not be negative")
        self.max_gamma = max_gamma
        self._random = random.Random(seed)
        self._round = 0
        self._losses = [0.0] * (max_gamma + 1)
        self._drawn = [0.0] * (max_gamma + 1)  # probability of each arm's last draw; 0: none to credit
        self._largest = 0.0  # tokens per second

    def decide(self, state: State) -> int:
        if state.residency is not Residency.RESIDENT:
            self._drawn[0] = 0.0
            return 0
        self._round += 1
        arms = self.max_gamma + 1
        eta = math.sqrt(math.log(arms) / (self._round * arms))
        least = min(self._losses)  # taken out of every exponent, so that none of them underflows to an all-zero sum
        weights = [math.exp(-eta * (loss - least)) for loss in self._losses]
        total = sum(weights)
        rest = self._random.random() * total
        gamma = 0
        while gamma < self.max_gamma and rest >= weights[gamma]:
            rest -= weights[gamma]
            gamma += 1
        self._drawn[gamma] = weights[gamma] / total
        return gamma

    def observe(self, seen: Observation) -> None:
        check_observation(seen, self.max_gamma)
        reward = _throughput(seen)
        probability = self._drawn[seen.gamma]
        if reward is None or probability == 0.0:
            return
        self._largest = max(self._largest, reward)
        if self._largest > 0.0:
            self._losses[seen.gamma] += (self._largest - reward) / (self._largest * probability)

    def verify_budget(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {
            "random": save_random(self._random),
            "round": self._round,
            "losses": list(self._losses),
            "drawn": list(self._drawn),
            "largest": self._largest,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        if len(saved["losses"]) != self.max_gamma + 1:
            raise ValueError(f"snapshot has {len(saved['losses'])} arms; this policy has {self.max_gamma + 1}")
        load_random(self._random, saved["random"])
        self._round = int(saved["round"])
        self._losses = [float(loss) for loss in saved["losses"]]
        self._drawn = [float(probability) for probability in saved["drawn"]]
        self._largest = float(saved["largest"])
