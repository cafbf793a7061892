"""How long a step takes, in seconds, predicted for batch sizes and gammas never tried.

A small regression shared by everything seen,

    T(gamma, B, KV) = c0 + c1 * B * (gamma + 1) + c2 * KV + [gamma > 0] * (c3 + gamma * (c4 + c5 * B))

(fixed cost; tokens through the target; KV read; one draft forward's fixed and per-request cost;
none negative), fitted to relative errors so that short and long steps count alike. A roofline is not linear, so each cell
(B, gamma) also keeps the mean of its own steps, which takes over as samples arrive and fades
again as they age.
"""

from typing import Any

_FEATURES = 6
_KEEP = 0.998  # discount of the regression per step: about 500 steps are remembered
_REFIT_EVERY = 8  # steps
_SWEEPS = 6  # coordinate descent sweeps per refit, warm-started
_RIDGE = 1e-4

_BELIEF = 3.0  # steps the regression is worth against a cell's own mean
_CELL_WINDOW = 256.0  # steps a cell's mean remembers
_CELL_FADE = 0.9999  # a cell's samples fade by this per step of the server
_MODEL_ERROR = 0.10  # relative error assumed of the regression where a cell has no samples
_CLIP = 3.0  # a step this many times off its prediction is a hiccup: counted as that much
_TRUST = 30  # steps before hiccups are told from learning


class StepTime:
    """Online estimate of step seconds; see the module's docstring."""

    def __init__(self, max_gamma: int) -> None:
        self._max_gamma = max_gamma
        self._normal = [[0.0] * _FEATURES for _ in range(_FEATURES)]
        self._target = [0.0] * _FEATURES
        # Before the first step: a draft forward is taken for a tenth of a target's.
        self._weights = [0.02, 0.0, 0.0, 0.0, 0.002, 0.0]
        self._cells: dict[tuple[int, int], list[float]] = {}  # -> [weight, mean s, mean KV tokens, step of last]
        self._steps = 0
        self._noise = 0.05  # typical relative deviation of a step

    def observe(self, gamma: int, batch_size: int, kv_tokens: int, seconds: float) -> None:
        """Learns one step without prefill."""
        self._steps += 1
        predicted = self.predict(gamma, batch_size, kv_tokens)
        if self._steps > _TRUST:
            seconds = min(max(seconds, predicted / _CLIP), predicted * _CLIP)
            self._noise += 0.02 * (min(abs(seconds / predicted - 1.0), 1.0) - self._noise)
        row = _features(gamma, batch_size, kv_tokens)
        scale = 1.0 / seconds
        for i in range(_FEATURES):
            own = self._normal[i]
            value = row[i] * scale
            for j in range(i, _FEATURES):
                own[j] = own[j] * _KEEP + value * row[j] * scale
            self._target[i] = self._target[i] * _KEEP + value
        if self._steps <= _REFIT_EVERY or self._steps % _REFIT_EVERY == 0:
            self._fit()

        cell = self._cells.get((batch_size, gamma))
        if cell is None:
            self._cells[batch_size, gamma] = [1.0, seconds, float(kv_tokens), float(self._steps)]
            return
        weight = cell[0] * _CELL_FADE ** (self._steps - cell[3])
        cell[0] = weight = min(weight + 1.0, _CELL_WINDOW)
        cell[1] += (seconds - cell[1]) / weight
        cell[2] += (kv_tokens - cell[2]) / weight
        cell[3] = self._steps

    def predict(self, gamma: int, batch_size: int, kv_tokens: int) -> float:
        """Seconds of a step; the cell's own mean, moved along KV, weighed against the regression."""
        row = _features(gamma, batch_size, kv_tokens)
        line = sum(weight * value for weight, value in zip(self._weights, row, strict=True))
        line = max(line, 1e-6)
        cell = self._cells.get((batch_size, gamma))
        if cell is None:
            return line
        weight = cell[0] * _CELL_FADE ** (self._steps - cell[3])
        own = max(cell[1] + self._weights[2] * (kv_tokens - cell[2]), 0.2 * cell[1])
        return (line * _BELIEF + own * weight) / (_BELIEF + weight)

    def relative_error(self, gamma: int, batch_size: int) -> float:
        """Standard error of `predict`, relative to it: the regression's bias and the cell's noise."""
        cell = self._cells.get((batch_size, gamma))
        weight = 0.0 if cell is None else cell[0] * _CELL_FADE ** (self._steps - cell[3])
        return _MODEL_ERROR * _BELIEF / (_BELIEF + weight) + self._noise / (1.0 + weight) ** 0.5

    def samples(self, gamma: int, batch_size: int) -> float:
        """Steps the cell still remembers, faded."""
        cell = self._cells.get((batch_size, gamma))
        return 0.0 if cell is None else cell[0] * _CELL_FADE ** (self._steps - cell[3])

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent on the discounted normal equations."""
        normal, weights = self._normal, self._weights
        for _ in range(_SWEEPS):
            for i in range(_FEATURES):
                diagonal = normal[i][i]
                if diagonal <= 0.0:
                    continue
                residual = self._target[i]
                for j in range(_FEATURES):
                    if j != i:
                        residual -= (normal[i][j] if j > i else normal[j][i]) * weights[j]
                ridge = _RIDGE * diagonal  # towards the present value: what the data cannot tell stays put
                weights[i] = max((residual + ridge * weights[i]) / (diagonal + ridge), 0.0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "normal": [list(row) for row in self._normal],
            "target": list(self._target),
            "weights": list(self._weights),
            "cells": [[*key, *cell] for key, cell in self._cells.items()],
            "steps": self._steps,
            "noise": self._noise,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self._normal = [[float(value) for value in row] for row in saved["normal"]]
        self._target = [float(value) for value in saved["target"]]
        self._weights = [float(value) for value in saved["weights"]]
        self._cells = {(int(b), int(g)): [float(v) for v in cell] for b, g, *cell in saved["cells"]}
        self._steps = int(saved["steps"])
        self._noise = float(saved["noise"])


def _features(gamma: int, batch_size: int, kv_tokens: int) -> tuple[float, ...]:
    return (
        1.0,
        float(batch_size * (gamma + 1)),
        float(kv_tokens),
        1.0 if gamma else 0.0,
        float(gamma),
        float(gamma * batch_size),
    )
