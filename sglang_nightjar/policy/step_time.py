"""How long a step takes, in seconds, predicted for batch sizes and gammas never tried.

One regression is shared by everything seen. With n = B * (gamma + 1) tokens through the target,

    T = c0 + c1 * n + sum over knees k of h_k * max(0, n - k) + c2 * KV
        + [gamma > 0] * (c3 + gamma * (c4 + c5 * B))

(fixed cost; a convex piecewise line over tokens, as a roofline is; KV read; a draft forward's
fixed and per-request cost; no coefficient negative), fitted to relative errors so that short and
long steps count alike. Each cell (B, gamma) also keeps the mean of its own steps, which takes
over as samples arrive and fades again as they age.
"""

from typing import Any

import numpy as np

_KNEES = (16, 32, 64, 128, 256, 512)  # tokens
_FEATURES = 6 + len(_KNEES)
_KV, _DRAFT = 2 + len(_KNEES), 4 + len(_KNEES)  # indices of the coefficients c2 and c4
_KEEP = 0.998  # discount of the regression per step: about 500 steps are remembered
_REFIT_EVERY = 16  # steps
_SWEEPS = 4  # coordinate descent sweeps per refit, warm-started
_RIDGE = 1e-4

_BELIEF = 3.0  # steps the regression is worth against a cell's own mean
_CELL_WINDOW = 256.0  # steps a cell's mean remembers
_CELL_FADE = 0.9999  # a cell's samples fade by this per step of the server
_LINE_ERROR = 0.10  # relative error assumed of the regression until it is known
_CLIP = 3.0  # a step this many times off its prediction is a hiccup: counted as that much
_TRUST = 30  # steps before hiccups are told from learning


class StepTime:
    """Online estimate of step seconds; see the module's docstring."""

    def __init__(self, max_gamma: int) -> None:
        self._max_gamma = max_gamma
        self._normal = np.zeros((_FEATURES, _FEATURES))
        self._target = np.zeros(_FEATURES)
        # Before the first step: a draft forward is taken for a tenth of a target's.
        self._weights = [0.0] * _FEATURES
        self._weights[0], self._weights[_DRAFT] = 0.02, 0.002
        self._cells: dict[tuple[int, int], list[float]] = {}  # -> [weight, mean s, mean KV tokens, step of last]
        self._pending: list[tuple[tuple[float, ...], float]] = []  # features and seconds not yet in the sums
        self._steps = 0
        self._noise = 0.05  # typical relative deviation of a step from its cell
        self._line_error = _LINE_ERROR  # and of a cell from the regression

    def observe(self, gamma: int, batch_size: int, kv_tokens: int, seconds: float) -> None:
        """Learns one step without prefill."""
        self._steps += 1
        row = _features(gamma, batch_size, kv_tokens)
        line = self._line(row)
        cell = self._cells.get((batch_size, gamma))
        weight = 0.0 if cell is None else cell[0] * _CELL_FADE ** (self._steps - cell[3])
        if self._steps > _TRUST:
            predicted = self._mix(line, cell, weight, kv_tokens)
            seconds = min(max(seconds, predicted / _CLIP), predicted * _CLIP)
            self._noise += 0.02 * (min(abs(seconds / predicted - 1.0), 1.0) - self._noise)
        self._pending.append((row, seconds))
        if self._steps <= _REFIT_EVERY or len(self._pending) >= _REFIT_EVERY:
            self._fit()

        if cell is None:
            self._cells[batch_size, gamma] = [1.0, seconds, float(kv_tokens), float(self._steps)]
            return
        if self._steps > _TRUST and weight > _BELIEF:
            self._line_error += 0.01 * (min(abs(line / cell[1] - 1.0), 0.5) - self._line_error)
        cell[0] = weight = min(weight + 1.0, _CELL_WINDOW)
        cell[1] += (seconds - cell[1]) / weight
        cell[2] += (kv_tokens - cell[2]) / weight
        cell[3] = self._steps

    def predict(self, gamma: int, batch_size: int, kv_tokens: int) -> float:
        """Seconds of a step; the cell's own mean, moved along KV, weighed against the regression."""
        line = self._line(_features(gamma, batch_size, kv_tokens))
        cell = self._cells.get((batch_size, gamma))
        weight = 0.0 if cell is None else cell[0] * _CELL_FADE ** (self._steps - cell[3])
        return self._mix(line, cell, weight, kv_tokens)

    def _mix(self, line: float, cell: list[float] | None, weight: float, kv_tokens: int) -> float:
        """The regression's `line` and the mean of a cell of `weight` faded samples, weighed."""
        if cell is None:
            return line
        own = max(cell[1] + self._weights[_KV] * (kv_tokens - cell[2]), 0.2 * cell[1])
        return (line * _BELIEF + own * weight) / (_BELIEF + weight)

    def _line(self, row: tuple[float, ...]) -> float:
        return max(sum(map(float.__mul__, self._weights, row)), 1e-6)

    def relative_error(self, gamma: int, batch_size: int) -> float:
        """Standard error of `predict`, relative to it: the regression's bias and the cell's noise."""
        cell = self._cells.get((batch_size, gamma))
        weight = 0.0 if cell is None else cell[0] * _CELL_FADE ** (self._steps - cell[3])
        error: float = self._line_error * _BELIEF / (_BELIEF + weight) + self._noise / (1.0 + weight) ** 0.5
        return error

    def samples(self, gamma: int, batch_size: int) -> float:
        """Steps the cell still remembers, faded."""
        cell = self._cells.get((batch_size, gamma))
        return 0.0 if cell is None else cell[0] * _CELL_FADE ** (self._steps - cell[3])

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent on the discounted normal equations.

        Steps are taken in several at a time: one by one they would cost more than they teach.
        """
        rows = np.array([row for row, _ in self._pending])
        rows /= np.array([[seconds] for _, seconds in self._pending])  # relative errors: the target is 1
        ages = np.arange(len(rows) - 1, -1, -1)
        discounted = rows * (_KEEP**ages)[:, None]
        self._normal = self._normal * _KEEP ** len(rows) + discounted.T @ rows
        self._target = self._target * _KEEP ** len(rows) + discounted.sum(0)
        self._pending.clear()
        normal, target = self._normal.tolist(), self._target.tolist()
        weights = self._weights
        for _ in range(_SWEEPS):
            for i, own in enumerate(normal):
                diagonal = own[i]
                if diagonal <= 0.0:
                    continue
                # The ridge pulls towards the present value: what the data cannot tell stays put.
                residual = target[i] - sum(map(float.__mul__, own, weights)) + diagonal * weights[i]
                ridge = _RIDGE * diagonal
                weights[i] = max((residual + ridge * weights[i]) / (diagonal + ridge), 0.0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "pending": [[list(row), seconds] for row, seconds in self._pending],
            "normal": self._normal.tolist(),
            "target": self._target.tolist(),
            "weights": list(self._weights),
            "cells": [[*key, *cell] for key, cell in self._cells.items()],
            "steps": self._steps,
            "errors": [self._noise, self._line_error],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self._pending = [(tuple(float(value) for value in row), float(seconds)) for row, seconds in saved["pending"]]
        self._normal = np.array(saved["normal"], dtype=np.float64)
        self._target = np.array(saved["target"], dtype=np.float64)
        self._weights = [float(value) for value in saved["weights"]]
        self._cells = {(int(b), int(g)): [float(v) for v in cell] for b, g, *cell in saved["cells"]}
        self._steps = int(saved["steps"])
        self._noise, self._line_error = (float(value) for value in saved["errors"])


def _features(gamma: int, batch_size: int, kv_tokens: int) -> tuple[float, ...]:
    tokens = float(batch_size * (gamma + 1))
    return (
        1.0,
        tokens,
        *[tokens - knee if tokens > knee else 0.0 for knee in _KNEES],
        float(kv_tokens),
        1.0 if gamma else 0.0,
        float(gamma),
        float(gamma * batch_size),
    )
