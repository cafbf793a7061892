"""The requests being decoded, as columns of numbers: a step touches all of them at once."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Commitment:
    """What a decode step committed.

    Attributes:
        tokens: of all requests. histogram: `histogram[i]` requests committed i + 1 tokens; `cut` others,
            `cut_tokens` together, were cut by their end.
        ended: ids of the requests that ended. freed: KV slots they held.
    """

    tokens: int = 0
    histogram: tuple[int, ...] = ()
    cut: int = 0
    cut_tokens: int = 0
    ended: tuple[int, ...] = ()
    freed: int = 0


class Running:
    """At most `most` requests, kept in the order of their admission, without gaps.

    Columns, each [count]:
        ids: index of the request in the run's work.
        context: tokens whose KV is in the cache.
        generated: output tokens so far. remaining: those to come.
        lag: context tokens the draft has not seen.
        position: where the request's next output token stands in the acceptance table.
        alpha: acceptance.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._ints = np.zeros((6, most), np.int64)
        self._alpha = np.zeros(most)
        self._view()

    def _view(self) -> None:
        self.ids, self.context, self.generated, self.remaining, self.lag, self.position = self._ints[:, : self.count]
        self.alpha = self._alpha[: self.count]

    def add(
        self, request: int, context: int, generated: int, remaining: int, lag: int, position: int, alpha: float
    ) -> None:
        """Appends one request."""
        index = self.count
        if index >= self.most:
            raise RuntimeError(f"more than {self.most} running requests")
        self._ints[:, index] = (request, context, generated, remaining, lag, position)
        self._alpha[index] = alpha
        self.count = index + 1
        self._view()

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        """Drops the requests where `mask`, [count], is false."""
        kept = self._ints[:, : self.count][:, mask]
        alpha = self._alpha[: self.count][mask]
        self.count = kept.shape[1]
        self._ints[:, : self.count] = kept
        self._alpha[: self.count] = alpha
        self._view()

    def pop(self) -> tuple[int, int, int]:
        """Takes out the youngest: its (id, context, generated)."""
        request, context, generated = (int(value) for value in self._ints[:3, self.count - 1])
        self.count -= 1
        self._view()
        return request, context, generated

    def commit(self, committed: Ints, gamma: int, drafting: npt.NDArray[np.bool_] | None) -> Commitment:
        """Adds `committed` tokens to each request, at most what it still has to come, and drops those that end.

        Args:
            committed: tokens, [count]. gamma: of the step.
            drafting: which requests drafted, [count]; None: all (or none at gamma 0).
        """
        ended = committed >= self.remaining
        any_ended = bool(ended.any())
        counted = committed
        cut = cut_tokens = 0
        if any_ended:
            committed = np.minimum(committed, self.remaining)
            if gamma:  # at gamma 0 every request commits one token, its last one too
                counted = committed[~ended]
                cut = len(committed) - len(counted)
                cut_tokens = int(committed[ended].sum())
        histogram = tuple(np.bincount(counted - 1, minlength=gamma + 1).tolist()) if gamma else (len(counted),)
        self.context += committed
        self.generated += committed
        self.position += committed
        self.remaining -= committed
        if gamma == 0:
            self.lag += 1
        elif drafting is not None:
            self.lag += ~drafting
        tokens = int(committed.sum())
        if not any_ended:
            return Commitment(tokens, histogram)
        freed = int(self.context[ended].sum())
        ids = tuple(self.ids[ended].tolist())
        self.keep(~ended)
        return Commitment(tokens, histogram, cut, cut_tokens, ids, freed)


def catch_up(lag: Ints, budget: int) -> int:
    """Lets the draft read up to `budget` lagging tokens, the smallest lags first; `lag` is lowered in place.

    Smallest first brings the most requests back to drafting per token read. Returns the tokens read.
    """
    total = int(lag.sum())
    if total <= budget:
        lag[:] = 0
        return total
    order = np.argsort(lag, kind="stable")
    sorted_lag = lag[order]
    before = np.cumsum(sorted_lag) - sorted_lag
    take = np.clip(budget - before, 0, sorted_lag)
    lag[order] = sorted_lag - take
    return budget
