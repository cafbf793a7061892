"""DSD: the gamma with the largest predicted goodput, by a fitted latency model and an acceptance rate."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_nightjar.policy.acceptance import drafting_requests
from sglang_nightjar.policy.base import Observation, Residency, State, StepKind, check_observation


@dataclass(frozen=True, slots=True)
class DsdConfig:
    """Settings of `Dsd`; the first three are the authors' code's.

    Attributes:
        initial_acceptance: acceptance rate before any is seen.
        acceptance_weight: of the newest step in the moving average of the acceptance rate.
        plain_margin: goodput of gamma 0 is multiplied by this, to speculate only for a clear gain.
        profile_rounds: rounds over all gammas at the start, to have something to fit.
        refit_interval: steps between fits of the latency model.
    """

    initial_acceptance: float = 0.7
    acceptance_weight: float = 0.15
    plain_margin: float = 1.1
    profile_rounds: int = 4
    refit_interval: int = 20


_TERMS = 6


def _terms(batch_size: int, kv_tokens: int, gamma: int) -> tuple[float, ...]:
    """What a step's time is linear in: three terms of the target's pass, three of gamma passes of the draft."""
    return (
        1.0,
        float(kv_tokens),
        float(batch_size * (gamma + 1)),
        float(gamma),
        float(gamma * kv_tokens),
        float(gamma * batch_size),
    )


def _fit(squares: np.ndarray[Any, Any], products: np.ndarray[Any, Any]) -> list[float]:
    """Least squares without negative coefficients, from `X'X` and `X'y`.

    No pass gets faster by more work, and with a negative coefficient (noise, or a term that
    hardly varied so far) a larger batch would be predicted to take no time. So the most
    negative term is dropped and the rest fitted again, until none is negative.
    """
    scale = np.sqrt(np.diag(squares))
    kept = [term for term in range(_TERMS) if scale[term] > 0.0]
    found = np.zeros(_TERMS)
    while kept:
        size = scale[kept]
        # Terms span many orders of magnitude and may move together (a constant batch): scaling
        # and a small ridge keep the system solvable and share out what cannot be told apart.
        system = squares[np.ix_(kept, kept)] / np.outer(size, size) + 1e-6 * np.eye(len(kept))
        solved = np.linalg.solve(system, products[kept] / size) / size
        worst = int(np.argmin(solved * size))
        if solved[worst] >= 0.0:
            found[kept] = solved
            break
        del kept[worst]
    return [float(value) for value in found]


class Dsd:
    """Maximizes goodput, the tokens expected per second of a step, with the batch as context.

    Source: SmartSpec / DSD / TurboSpec, arXiv 2406.14066, and the authors' vLLM code. For B
    requests with C tokens of KV together, drafting k tokens each at acceptance rate a:

        expected tokens = B * (1 - a^(k+1)) / (1 - a)
        seconds = [d + x C + y B (k+1)] + k [d' + x' C + y' B]
                  (one pass of the target)  (k passes of the draft)
        goodput = expected tokens / seconds

    The coefficients are in seconds (d), seconds per context token (x) and per batched token
    (y). `a` is a moving average, with the last step's weight 0.15.

    Deviations: the authors profile draft and target apart before serving. Here only the
    time of whole steps is seen, so the sum is fitted online, from steps that only decode and
    without their catch-up time. Something must then be tried first: the first decisions go
    through all gammas in turn. A step's acceptance rate is accepted drafts over accepted and
    rejected ones (those after a rejection were never judged). One gamma serves the whole
    batch, as in the authors' code. As in the paper nothing is explored after the profile: at
    gamma 0 no acceptance is seen, so a speculation that stopped for low acceptance comes back
    only by a change of batch size or context.
    """

    def __init__(self, max_gamma: int, config: DsdConfig | None = None) -> None:
        if max_gamma < 0:
            raise ValueError(f"max_gamma is {max_gamma}; it must not be negative")
        self.max_gamma = max_gamma
        self.config = config or DsdConfig()
        self._acceptance = self.config.initial_acceptance
        self._squares = [0.0] * (_TERMS * _TERMS)  # X'X, row by row, lower half only
        self._products = [0.0] * _TERMS  # X'y
        self._coefficients: list[float] | None = None
        self._unfitted = 0  # steps since the last fit
        self._profiled = 0  # decisions of the profile so far

    def decide(self, state: State) -> int:
        if state.residency is not Residency.RESIDENT:
            return 0
        arms = self.max_gamma + 1
        if self._profiled < self.config.profile_rounds * arms:
            self._profiled += 1
            return (self._profiled - 1) % arms
        if self._unfitted and (self._coefficients is None or self._unfitted >= self.config.refit_interval):
            self._refit()
        if self._coefficients is None:
            return 0
        base, context, token, draft, draft_context, draft_token = self._coefficients
        batch, kv = state.batch_size, state.kv_tokens
        seconds = base + context * kv + token * batch
        per_draft = token * batch + draft + draft_context * kv + draft_token * batch
        tokens = power = 1.0
        # Comparing products rather than quotients leaves a fit of all zeros at gamma 0.
        best, best_tokens, best_seconds = 0, self.config.plain_margin, seconds
        for gamma in range(1, arms):
            power *= self._acceptance
            tokens += power
            seconds += per_draft
            if tokens * best_seconds > best_tokens * seconds:
                best, best_tokens, best_seconds = gamma, tokens, seconds
        return best

    def observe(self, seen: Observation) -> None:
        check_observation(seen, self.max_gamma)
        if seen.batch_size == 0:
            return
        if seen.gamma > 0:
            self._learn_acceptance(seen)
        if seen.kind is not StepKind.DECODE:
            return
        seconds = seen.seconds - seen.catchup_seconds
        terms = _terms(seen.batch_size, seen.kv_tokens, seen.gamma)
        squares = self._squares
        for i, left in enumerate(terms):
            if left == 0.0:
                continue
            self._products[i] += left * seconds
            row = i * _TERMS
            for j in range(i + 1):
                squares[row + j] += left * terms[j]
        self._unfitted += 1

    def _learn_acceptance(self, seen: Observation) -> None:
        histogram = drafting_requests(seen)
        accepted = rejected = 0
        for count, requests in enumerate(histogram):
            accepted += count * requests
            if count < seen.gamma:
                rejected += requests
        if accepted + rejected > 0:
            newest = accepted / (accepted + rejected)
            self._acceptance += self.config.acceptance_weight * (newest - self._acceptance)

    def _refit(self) -> None:
        lower = np.array(self._squares).reshape(_TERMS, _TERMS)
        self._coefficients = _fit(lower + np.tril(lower, -1).T, np.array(self._products))
        self._unfitted = 0

    def verify_budget(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {
            "acceptance": self._acceptance,
            "squares": list(self._squares),
            "products": list(self._products),
            "coefficients": self._coefficients and list(self._coefficients),
            "unfitted": self._unfitted,
            "profiled": self._profiled,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        coefficients = saved["coefficients"]
        self._acceptance = float(saved["acceptance"])
        self._squares = [float(value) for value in saved["squares"]]
        self._products = [float(value) for value in saved["products"]]
        self._coefficients = None if coefficients is None else [float(value) for value in coefficients]
        self._unfitted = int(saved["unfitted"])
        self._profiled = int(saved["profiled"])
