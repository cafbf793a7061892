"""C_switch(lag, batch): what it costs to bring the draft up to date, in seconds.

While speculation is off the draft's KV falls behind by the tokens committed meanwhile (the
lag). Before drafting again those tokens go through the draft as one batched extend. The paper
(arXiv 2512.22420) measures a table over lag and batch size and interpolates; on an RTX 4090 it
reports 17.87 ms to 102.03 ms for lags of 128 to 512 at batch sizes 32 and 64.
"""

import math
from collections.abc import Iterable
from typing import Any

# Before anything is measured: the line through the paper's two extremes, (128 x 32 tokens,
# 17.87 ms) and (512 x 64 tokens, 102.03 ms). Measurements replace it; zero is never assumed.
_PRIOR_BASE_S = 5.85e-3
_PRIOR_PER_TOKEN_S = 2.935e-6
_PRIOR_WEIGHT = 1.0  # the prior counts as this many measurements

_LEAST_S = 1e-6
_CELL_WINDOW = 32.0  # a cell averages about this many of its last measurements
_MEMORY = 0.98  # weight of all earlier measurements of the line, per new one


class SwitchCost:
    """A line over the tokens to catch up, corrected by the cells measured nearby.

    Cells are powers of two of (lag, batch). A query interpolates the four cells around it in
    log space and, outside of what was measured, follows the line (so it extrapolates in
    proportion to the work, not by repeating the last cell).
    """

    def __init__(self, table: Iterable[tuple[int, int, float]] = ()) -> None:
        """`table`: measured (lag in tokens, batch in requests, seconds), such as a warm-up's."""
        # Discounted sums of weight, tokens, seconds, tokens^2, tokens x seconds: the line's normal equations.
        self._sums = [0.0] * 5
        self._base, self._per_token = _PRIOR_BASE_S, _PRIOR_PER_TOKEN_S
        self._cells: dict[tuple[int, int], list[float]] = {}  # (log2 lag, log2 batch) -> [weight, mean s, mean tokens]
        for lag, batch, seconds in table:
            self.observe(lag, batch, seconds)

    def __call__(self, lag: float, batch: int) -> float:
        """Seconds to catch up `batch` requests that lag `lag` tokens each; 0 only where nothing lags."""
        if lag <= 0 or batch <= 0:
            return 0.0
        line = self._line(lag * batch)
        if not self._cells:
            return line
        x, y = math.log2(max(lag, 1.0)), math.log2(batch)
        low_x, low_y = math.floor(x), math.floor(y)
        correction = 0.0
        for cell_x, share_x in ((low_x, low_x + 1 - x), (low_x + 1, x - low_x)):
            for cell_y, share_y in ((low_y, low_y + 1 - y), (low_y + 1, y - low_y)):
                cell = self._cells.get((cell_x, cell_y))
                if cell is not None:  # an unmeasured corner keeps the line
                    correction += share_x * share_y * (cell[1] / self._line(cell[2]) - 1.0)
        return max(line * (1.0 + correction), _LEAST_S)

    def observe(self, lag: float, batch: int, seconds: float) -> None:
        """A real catch-up of `batch` requests, `lag` tokens each on average, took `seconds`.

        Raises:
            ValueError: a value is not positive and finite; the message names it.
        """
        for name, value in (("lag", lag), ("batch", batch), ("seconds", seconds)):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"switch cost {name} is {value}; it must be positive and finite")
        tokens = lag * batch
        weight, sum_t, sum_s, sum_tt, sum_ts = (value * _MEMORY for value in self._sums)
        self._sums = [
            weight + 1.0,
            sum_t + tokens,
            sum_s + seconds,
            sum_tt + tokens * tokens,
            sum_ts + tokens * seconds,
        ]
        self._fit()
        key = (round(math.log2(max(lag, 1.0))), round(math.log2(batch)))
        cell = self._cells.setdefault(key, [0.0, 0.0, 0.0])
        cell[0] = min(cell[0] + 1.0, _CELL_WINDOW)
        cell[1] += (seconds - cell[1]) / cell[0]
        cell[2] += (tokens - cell[2]) / cell[0]

    def _line(self, tokens: float) -> float:
        return max(self._base + self._per_token * tokens, _LEAST_S)

    def _fit(self) -> None:
        """Least squares with neither coefficient negative, the prior's line held with a small weight."""
        weight, sum_t, sum_s, sum_tt, sum_ts = self._sums
        # The prior as two pseudo-measurements, at nothing and at twice the mean size.
        reach = 2.0 * sum_t / weight
        for tokens in (0.0, reach):
            share = _PRIOR_WEIGHT / (1.0 + weight)  # fades as measurements come
            weight_of_prior = share * 0.5
            seconds = _PRIOR_BASE_S + _PRIOR_PER_TOKEN_S * tokens
            weight += weight_of_prior
            sum_t += weight_of_prior * tokens
            sum_s += weight_of_prior * seconds
            sum_tt += weight_of_prior * tokens * tokens
            sum_ts += weight_of_prior * tokens * seconds
        spread = weight * sum_tt - sum_t * sum_t
        slope = (weight * sum_ts - sum_t * sum_s) / spread if spread > 0 else _PRIOR_PER_TOKEN_S
        slope = max(slope, 0.0)
        base = (sum_s - slope * sum_t) / weight
        if base < 0.0:
            base, slope = 0.0, sum_ts / sum_tt
        self._base, self._per_token = base, slope

    def snapshot(self) -> dict[str, Any]:
        return {
            "sums": list(self._sums),
            "line": [self._base, self._per_token],
            "cells": [[*key, *cell] for key, cell in self._cells.items()],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self._sums = [float(value) for value in saved["sums"]]
        self._base, self._per_token = (float(value) for value in saved["line"])
        self._cells = {(int(x), int(y)): [float(v) for v in cell] for x, y, *cell in saved["cells"]}
