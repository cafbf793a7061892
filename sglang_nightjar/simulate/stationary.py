"""The bandit's problem alone, for regret: decisions in a stationary world, no requests, no queue.

In each decision the batch size B is given (fixed, or a small Markov chain that the decisions do
not influence) and a policy chooses gamma. The draft's lag grows by one token per decision of 0,
up to a limit, and a positive gamma brings it to 0. The loss of a decision, s per token, is

    L(B, lag, gamma) = E[step seconds] / E[tokens] + [gamma > 0] * C_switch(lag, B) / share

where `share` is gamma (the paper's loss) or, with `charge="tokens"`, the step's expected tokens (the
time clients really feel; the paper's charge is about B times that). The policy sees noisy steps. The
oracle knows L and plans ahead, by value iteration over (B, lag): its switches must pay for themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sglang_nightjar.policy.base import Observation, Policy, Residency, State, StepKind
from sglang_nightjar.simulate.acceptance import Floats, commit_probabilities
from sglang_nightjar.simulate.protocols import Cost

_SAMPLES = 1024  # steps drawn per cell and used in random order
_SLOTS = 1 << 20


@dataclass(frozen=True)
class World:
    """A stationary environment.

    Attributes:
        alphas: acceptance of requests drawn at random, [samples].
        batches: batch sizes; `weights`: how often each comes. stay: probability that the batch size stays.
        context: KV tokens of each request. most_lag: tokens each request lags at most.
        charge: what a catch-up's seconds are divided by, see the module's docstring.
        time_noise: standard deviation of the logarithm of a step's time.
    """

    name: str
    cost: Cost
    alphas: Floats
    batches: tuple[int, ...]
    weights: tuple[float, ...] = (1.0,)
    stay: float = 0.98
    context: int = 400
    most_lag: int = 128
    charge: Literal["paper", "tokens"] = "tokens"
    time_noise: float = 0.05


class Tables:
    """The truth about a world.

    Attributes:
        seconds: of a step, [batches, gammas]. loss: seconds per token of it, [batches, gammas].
        catchup: seconds, [batches, most_lag + 1]. share: its divisor, [batches, gammas].
    """

    def __init__(self, world: World) -> None:
        cost, context = world.cost, world.context
        gammas = range(cost.max_gamma + 1)
        each = np.array([float(commit_probabilities(world.alphas, g) @ np.arange(1, g + 2)) for g in gammas])
        tokens = np.array(world.batches)[:, None] * each
        self.seconds = np.array([[cost.step_s(b, g, float(b * context)) for g in gammas] for b in world.batches])
        self.loss = self.seconds / tokens
        lags = range(world.most_lag + 1)
        self.catchup = np.array([[cost.catchup_s(b * lag, float(b * context)) for lag in lags] for b in world.batches])
        self.share = np.broadcast_to(np.maximum(gammas, 1.0), tokens.shape) if world.charge == "paper" else tokens

    def plan(self, weights: Sequence[float], stay: float) -> npt.NDArray[np.int64]:
        """The policy of least average loss: gamma by batch index and lag, [batches, most_lag + 1]."""
        batches, lags = self.catchup.shape
        chance = np.asarray(weights, dtype=np.float64)
        move = stay * np.eye(batches) + (1.0 - stay) * chance / chance.sum()
        price = self.loss[:, None, 1:] + self.catchup[:, :, None] / self.share[:, None, 1:]
        best_on, price_on = price.argmin(axis=2) + 1, price.min(axis=2)
        grown = np.minimum(np.arange(lags) + 1, lags - 1)
        value = np.zeros((batches, lags))
        while True:
            after = move @ value
            off, on = self.loss[:, :1] + after[:, grown], price_on + after[:, :1]
            new = np.minimum(off, on)
            new -= new[0, 0]
            if np.abs(new - value).max() < 1e-9 * self.loss.max():
                return np.where(off <= on, 0, best_on)
            value = new


@dataclass(frozen=True)
class Trajectory:
    """Losses of each decision, s per token, [decisions] each: the policy's, the oracle's, and the gammas chosen."""

    loss: Floats
    best: Floats
    gammas: npt.NDArray[np.int64]

    def regret(self, at: Sequence[int]) -> list[float]:
        """Cumulative regret after each of `at` decisions, s per token."""
        total = np.cumsum(self.loss - self.best)
        return [float(total[count - 1]) for count in at]


def log_spaced(most: int, least: int = 1000, per_decade: int = 4) -> list[int]:
    """Decision counts from `least` to `most`, evenly spaced in the logarithm."""
    decades = np.log10(most / least)
    return [int(round(least * 10**x)) for x in np.linspace(0, decades, max(2, int(round(decades * per_decade)) + 1))]


def run(policy: Policy, worlds: Sequence[World], decisions: Sequence[int], seed: int) -> Trajectory:
    """Plays `policy` for `decisions[i]` decisions in `worlds[i]`, one world after the other.

    All worlds of a run must have the same arms. The same seed gives the same batches and noise.
    """
    rng = np.random.default_rng([seed, 0xBA9D17])
    total = sum(decisions)
    losses, bests, chosen = np.zeros(total), np.zeros(total), np.zeros(total, np.int64)
    now_s, step = 0.0, 0
    lag = oracle_lag = 0
    decide, observe = policy.decide, policy.observe
    for world, count in zip(worlds, decisions, strict=True):
        # Plain lists: a decision must cost little beside the policy.
        tables = Tables(world)
        best = tables.plan(world.weights, world.stay).tolist()
        loss, seconds = tables.loss.tolist(), tables.seconds.tolist()
        catchup, share = tables.catchup.tolist(), tables.share.tolist()
        committed = [
            [_histograms(batch, commit_probabilities(world.alphas, gamma), rng) for gamma in range(len(loss[0]))]
            for batch in world.batches
        ]
        batch_index = _chain(world, count, rng)
        noise = np.exp(rng.standard_normal(count) * world.time_noise - world.time_noise**2 / 2).tolist()
        sample = rng.integers(0, _SAMPLES, count).tolist()
        lag, oracle_lag = min(lag, world.most_lag), min(oracle_lag, world.most_lag)
        for b, factor, index in zip(batch_index, noise, sample, strict=True):
            batch = world.batches[b]
            kv = batch * world.context
            gamma = decide(State(now_s, batch, kv, _SLOTS, _SLOTS, 0, False, lag, Residency.RESIDENT))
            value = loss[b][gamma]
            took = seconds[b][gamma] * factor
            caught, caught_s = 0, 0.0
            if gamma == 0:
                lag = min(lag + 1, world.most_lag)
            elif lag:
                caught, caught_s = lag * batch, catchup[b][lag]
                value += caught_s / share[b][gamma]
                took += caught_s
                lag = 0
            now_s += took
            observe(
                Observation(
                    StepKind.DECODE,
                    batch,
                    gamma,
                    committed[b][gamma][index],
                    took,
                    kv_tokens=kv,
                    free_slots=_SLOTS,
                    total_slots=_SLOTS,
                    max_lag=lag,
                    catchup_tokens=caught,
                    catchup_seconds=caught_s,
                )
            )
            losses[step] = value
            chosen[step] = gamma
            gamma = best[b][oracle_lag]
            value = loss[b][gamma]
            if gamma:
                value += catchup[b][oracle_lag] / share[b][gamma]
                oracle_lag = 0
            else:
                oracle_lag = min(oracle_lag + 1, world.most_lag)
            bests[step] = value
            step += 1
    return Trajectory(losses, bests, chosen)


def _histograms(batch: int, chance: Floats, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """`_SAMPLES` histograms of tokens committed by `batch` requests."""
    return [tuple(row) for row in rng.multinomial(batch, chance / chance.sum(), _SAMPLES).tolist()]


def _chain(world: World, count: int, rng: np.random.Generator) -> list[int]:
    """Batch indices of `count` decisions."""
    if len(world.batches) == 1:
        return [0] * count
    chance = np.asarray(world.weights) / np.sum(world.weights)
    fresh = rng.choice(len(world.batches), size=count, p=chance)
    jumps = rng.random(count) >= world.stay
    jumps[0] = True
    last = np.maximum.accumulate(np.where(jumps, np.arange(count), 0))
    drawn: list[int] = fresh[last].tolist()
    return drawn
