"""Which draft tokens the target accepts, as a random model.

Request r accepts the draft's token at output position p with probability alpha_r, drawn from a
Beta distribution (a mix of them: domains), times a drift that depends on time only, times
`position_decay` to the power of the token's place in the draft. Whether it is accepted is fixed by
one uniform number per (request, output position), whatever gamma was: so all policies meet the
same requests with the same easy and hard tokens.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_nightjar.simulate.fields import NotNegative, Positive, Share

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TABLE = 1 << 19  # uniform numbers; requests start at random places of the table


class Domain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of one kind: their share of all (`weight`), the mean of alpha, and a Beta's a + b (`concentration`)."""

    alpha: Share
    weight: Positive = 1.0
    concentration: Positive = 10.0


class DriftPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From `at_s` on, alpha is multiplied by `scale`."""

    at_s: NotNegative
    scale: NotNegative


class AcceptanceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a scenario file says about acceptance.

    Attributes:
        domains: kinds of requests.
        position_decay: each further draft position is accepted this much less often.
        drift: points in time order; abrupt, or linear between them when `gradual`.
        calibration: how well the draft's own probability tells good tokens from bad: 1 fully, 0 not at all.
    """

    domains: tuple[Domain, ...] = (Domain(0.7),)
    position_decay: Share = 1.0
    drift: tuple[DriftPoint, ...] = ()
    gradual: bool = False
    calibration: Share = 0.7

    def draw(self, count: int, rng: np.random.Generator) -> Floats:
        """alpha of `count` requests, [count]."""
        weights = np.array([domain.weight for domain in self.domains])
        kinds = rng.choice(len(self.domains), size=count, p=weights / weights.sum())
        mean = np.array([domain.alpha for domain in self.domains])[kinds]
        total = np.array([domain.concentration for domain in self.domains])[kinds]
        # A mean of exactly 0 or 1 has no Beta; it is a constant.
        inner = np.clip(mean, 1e-6, 1 - 1e-6)
        alpha = rng.beta(inner * total, (1 - inner) * total)
        return np.where((mean <= 0) | (mean >= 1), mean, alpha)

    def scale(self, now_s: float) -> float:
        """The drift's factor at `now_s`."""
        if not self.drift:
            return 1.0
        if self.gradual:
            times = [0.0, *(point.at_s for point in self.drift)]
            scales = [1.0, *(point.scale for point in self.drift)]
            return float(np.interp(now_s, times, scales))
        factor = 1.0
        for point in self.drift:
            if point.at_s > now_s:
                break
            factor = point.scale
        return factor


def expected_tokens(alpha: Floats | float, gamma: int, position_decay: float = 1.0) -> Floats:
    """Mean tokens one speculative step commits, 1 + sum over i of the product of the first i acceptances.

    Args:
        alpha: acceptance per request, any shape. gamma: draft tokens.

    Returns:
        The expectation, of alpha's shape.
    """
    chance = np.asarray(alpha, dtype=np.float64)
    total, alive = np.ones_like(chance), np.ones_like(chance)
    for place in range(gamma):
        alive = alive * np.minimum(chance * position_decay**place, 1.0)
        total = total + alive
    return total


def harmonic_tokens(alphas: Floats, gamma: int, position_decay: float = 1.0) -> float:
    """Mean tokens per step and request of a batch in steady state, where a request stays 1 / its own mean."""
    return float(1.0 / (1.0 / expected_tokens(alphas, gamma, position_decay)).mean())


def log_confidence(
    alpha: Floats, good: npt.NDArray[np.bool_], log_u1: Floats, log_u2: Floats, calibration: float
) -> Floats:
    """Logarithm of the probability q that a draft states for a token of which it is known whether it is accepted.

    q is Beta(s, 1) with s = alpha / (1 - alpha), whose mean is alpha, and the token is accepted with probability q.
    Given the outcome, q is Beta(s + 1, 1) where accepted, else Beta(s, 2); both are products of powers of uniforms:
    u2 ** (1 - alpha), and that times u1 ** ((1 - alpha) / alpha). u1 and u2 belong to the token, whatever the policy.

    Args:
        alpha: acceptance, any shape. good: whether the token is accepted, likewise.
        log_u1, log_u2: logarithms of two uniform numbers per token, likewise.
        calibration: 1 as above; 0: q is alpha, whatever the outcome; between them, a geometric mean.
    """
    alpha = np.clip(alpha, 1e-3, 1 - 1e-3)
    log_q: Floats = log_u2 + np.where(good, 0.0, log_u1 / alpha)
    log_q *= calibration * (1.0 - alpha)
    if calibration < 1.0:
        log_q += (1.0 - calibration) * np.log(alpha)
    return log_q


class Acceptance:
    """Samples accepted draft tokens, vectorised over the batch."""

    def __init__(self, spec: AcceptanceSpec, max_gamma: int, seed: int) -> None:
        self.spec = spec
        self._rng = np.random.default_rng([seed, 0xACCE])
        table = self._rng.random(_TABLE)
        # Its first numbers repeat behind its end, so that a window never wraps.
        self._table = np.concatenate((table, table[: max_gamma + 1])).astype(np.float64)
        self._places = np.arange(max_gamma + 1)
        # For budgets: two further uniforms per table entry, as logarithms, drawn when first needed.
        self._budget_rng = np.random.default_rng([seed, 0xB1D])
        self._logs: Floats | None = None
        self._decay = spec.position_decay ** np.arange(max_gamma + 1, dtype=np.float64)

    def starts(self, count: int) -> Ints:
        """Where in the table each of `count` requests begins, [count]."""
        return self._rng.integers(0, _TABLE, size=count)

    def accepted(
        self, position: Ints, alpha: Floats, gamma: int, now_s: float, budget: int | None = None
    ) -> tuple[Ints, int]:
        """Draft tokens each request gets accepted, and how many were verified.

        Args:
            position: each request's start plus the tokens it has generated, [batch].
            alpha: acceptance of each request, [batch].
            gamma: draft tokens of each request, at least 1.
            now_s: time, for the drift.
            budget: most draft tokens to verify over the batch, those with the largest cumulative draft
                probability first; None: all.

        Returns:
            Accepted tokens, [batch], each 0 .. gamma; and draft tokens verified, batch * gamma at most.
        """
        batch = len(position)
        spec = self.spec
        if spec.drift:
            alpha = np.minimum(alpha * spec.scale(now_s), 1.0)
        base = position % _TABLE
        uniform = self._table[base[:, None] + self._places[:gamma]]
        chance = alpha[:, None]
        if spec.position_decay != 1.0:
            chance = chance * self._decay[:gamma]
        # One more column that never accepts: the first refusal is then the accepted length.
        good = np.zeros((batch, gamma + 1), dtype=bool)
        np.less(uniform, chance, out=good[:, :gamma])
        accepted: Ints = good.argmin(axis=1)
        if budget is None or budget >= batch * gamma:
            return accepted, batch * gamma
        kept = self._within_budget(base, good[:, :gamma], np.broadcast_to(chance, uniform.shape), max(budget, 0))
        return np.minimum(accepted, kept), int(kept.sum())

    def _within_budget(self, base: Ints, good: npt.NDArray[np.bool_], chance: Floats, budget: int) -> Ints:
        """Draft tokens of each request within the `budget` best by cumulative draft probability, [batch]."""
        if self._logs is None:
            self._logs = np.log1p(-self._budget_rng.random((2, len(self._table))))
        gamma = good.shape[1]
        window = base[:, None] + self._places[:gamma]
        log_q = log_confidence(chance, good, self._logs[0][window], self._logs[1][window], self.spec.calibration)
        # Reach falls along each request's draft, so the best `budget` are prefixes of the drafts.
        reach = np.cumsum(log_q, axis=1).ravel()
        best = np.argsort(-reach, kind="stable")[:budget]
        return np.bincount(best // gamma, minlength=len(base)).astype(np.int64)


def mean_alpha(spec: AcceptanceSpec, samples: int = 4096, seed: int = 0) -> Floats:
    """A fixed sample of alpha over requests, [samples]: for expectations over the mix of requests."""
    return spec.draw(samples, np.random.default_rng(seed))


def commit_probabilities(alphas: Sequence[float] | Floats, gamma: int, position_decay: float = 1.0) -> Floats:
    """P(a step commits i + 1 tokens), [gamma + 1], for a request drawn at random from `alphas`."""
    chance = np.asarray(alphas, dtype=np.float64)
    alive, result = np.ones_like(chance), np.zeros(gamma + 1)
    for place in range(gamma):
        accept = np.minimum(chance * position_decay**place, 1.0)
        result[place] = float((alive * (1.0 - accept)).mean())
        alive = alive * accept
    result[gamma] = float(alive.mean())
    return result
