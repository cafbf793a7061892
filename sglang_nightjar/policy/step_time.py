"""How long a step takes, in seconds, predicted for batch sizes and gammas never tried.

One regression is shared by everything seen. With n = B * (gamma + 1) tokens through the target,

    T = c0 + c1 * n + sum over knees k of h_k * max(0, n - k) + c2 * KV
        + [gamma > 0] * (c3 + gamma * (c4 + c5 * B))

(fixed cost; a convex piecewise line over tokens, as a roofline is; KV read; a draft forward's
fixed and per-request cost; no coefficient negative), fitted to relative errors so that short and
long steps count alike. Where a step comes with the time its draft took, its two parts are fitted apart:
whole steps tell them apart only by batches tried both ways. Each cell (B, gamma) also keeps the mean of
its own steps, which takes over as samples arrive and fades again as they age.

Machines drift: clocks, heat, neighbours. The pace, by how much steps of well-known cells are longer lately than
those cells' means, is one factor on all predictions and is taken out of what is learned; otherwise an arm that was
played while the machine was slow would look worse than one played later.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_nightjar.policy.base import LEAST_SECONDS, Observation

_KNEES = (16, 32, 64, 128, 256, 512)  # tokens
_Floats = npt.NDArray[np.float64]

_FEATURES = 6 + len(_KNEES)
_KV, _DRAFT = 2 + len(_KNEES), 4 + len(_KNEES)  # indices of the coefficients c2 and c4
_OF_DRAFT = np.arange(_FEATURES) > _KV
_KEEP = 0.998  # discount of the regression per step: about 500 steps are remembered
_REFIT_EVERY = 16  # steps
_SWEEPS = 4  # coordinate descent sweeps per refit, warm-started
_RIDGE = 1e-4
_KV_RIDGE = 5e-2  # pull of c2 towards 0: KV grows with the batch, and must not explain what tokens and drafts do

_BELIEF = 3.0  # steps the regression is worth against a cell's own mean
_CELL_WINDOW = 256.0  # steps a cell's mean remembers
_CELL_FADE = 0.9999  # a cell's samples fade by this per step of the server
_LINE_ERROR = 0.10  # relative error assumed of the regression until it is known, for each doubling of the batch,
_FAR_ERROR = 0.10  # and for each doubling between it and the nearest batch at which off (or on) was ever tried
_BEYOND_ERROR = 0.20  # and for each doubling of the tokens through the target beyond what is known well
_CLIP = 3.0  # a step this many times off its prediction is a hiccup: counted as that much
_TRUST = 30  # steps before hiccups are told from learning
_KNOWN = 8.0  # steps in a cell's mean before it counts as known, and what departs from it is taken for the pace's
_PACE_GAIN, _PACE_LEAK = 0.125, 0.03125  # of each such step: a lasting change is left to the cells by and by
_PACE_CLIP = 0.3  # a hiccup is not a pace


def tells_step_time(seen: Observation) -> bool:
    """Whether a step was decoding alone and all of it at one gamma, so that its seconds are that cell's."""
    whole = seen.gamma == 0 or seen.drafted < 0 or seen.drafted == seen.batch_size
    decoded = seen.batch_size > 0 and seen.prefill_tokens == 0
    return whole and decoded and seen.seconds - seen.catchup_seconds >= LEAST_SECONDS


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
        self._pending: list[tuple[int, int, int, float, float]] = []  # (gamma, B, KV, s, draft's s), not in the sums
        self._steps = 0
        self._pace = 0.0  # logarithm
        self._noise = 0.05  # typical relative deviation of a step from its cell
        self._line_errors: dict[int, float] = {}  # and of a cell from the regression, by the batch's bit length
        self._tried: tuple[set[int], set[int]] = (set(), set())  # bit lengths of batches seen while off, and on
        self._most_tokens = 1  # of the well-known cells
        self._shortest: dict[int, float] = {}  # bit length of the batch -> shortest plain step, s

    def learn(self, seen: Observation) -> None:
        """Learns one step, without its catch-up; one that `tells_step_time` says nothing of teaches nothing."""
        if tells_step_time(seen):
            seconds = seen.seconds - seen.catchup_seconds
            self.observe(seen.gamma, seen.batch_size, seen.kv_tokens, seconds, seen.draft_seconds)

    def observe(self, gamma: int, batch_size: int, kv_tokens: int, seconds: float, draft_seconds: float = 0.0) -> None:
        """Learns one step without prefill. `draft_seconds`: the draft's part of it; 0 where it is not known."""
        draft_share = draft_seconds / seconds
        self._steps += 1
        line = self._line(gamma, batch_size, kv_tokens)
        cell = self._cells.get((batch_size, gamma))
        weight = self._weight(cell)
        predicted = self._mix(line, cell, weight, kv_tokens)
        if self._steps > _TRUST:
            expected = predicted * math.exp(self._pace)
            seconds = min(max(seconds, expected / _CLIP), expected * _CLIP)
        if cell is not None and weight >= _KNOWN:
            off = math.log(seconds / self._own(cell, kv_tokens)) - self._pace
            self._pace += _PACE_GAIN * min(max(off, -_PACE_CLIP), _PACE_CLIP)
        self._pace *= 1.0 - _PACE_LEAK
        seconds *= math.exp(-self._pace)
        if self._steps > _TRUST:
            self._noise += 0.02 * (min(abs(seconds / predicted - 1.0), 1.0) - self._noise)
        bits = batch_size.bit_length()
        self._tried[gamma > 0].add(bits)
        if gamma == 0:
            self._shortest[bits] = min(self._shortest.get(bits, seconds), seconds)
        self._pending.append((gamma, batch_size, kv_tokens, seconds, draft_share * seconds))
        if self._steps <= _REFIT_EVERY or len(self._pending) >= _REFIT_EVERY:
            self._fit()

        if cell is None:
            self._cells[batch_size, gamma] = [1.0, seconds, float(kv_tokens), float(self._steps)]
            return
        if self._steps > _TRUST and weight > _BELIEF:
            known = self._line_errors.get(bits, _LINE_ERROR)
            self._line_errors[bits] = known + 0.01 * (min(abs(line / cell[1] - 1.0), 0.5) - known)
        cell[0] = weight = min(weight + 1.0, _CELL_WINDOW)
        if weight >= _KNOWN:
            self._most_tokens = max(self._most_tokens, batch_size * (gamma + 1))
        cell[1] += (seconds - cell[1]) / weight
        cell[2] += (kv_tokens - cell[2]) / weight
        cell[3] = self._steps

    def predict(self, gamma: int, batch_size: int, kv_tokens: int) -> float:
        """Seconds of a step; the cell's own mean, moved along KV, weighed against the regression."""
        line = self._line(gamma, batch_size, kv_tokens)
        cell = self._cells.get((batch_size, gamma))
        weight = self._weight(cell)
        return self._mix(line, cell, weight, kv_tokens) * math.exp(self._pace)

    def growth(self, batch_size: int, larger: int, kv_tokens: int) -> float:
        """Seconds that `larger` requests' plain step takes longer than `batch_size`'s, by the regression alone."""
        added = self._line(0, larger, kv_tokens * larger // batch_size) - self._line(0, batch_size, kv_tokens)
        return added * math.exp(self._pace)

    def _mix(self, line: float, cell: list[float] | None, weight: float, kv_tokens: int) -> float:
        """The regression's `line` and the mean of a cell of `weight` faded samples, weighed."""
        if cell is None:
            return line
        return (line * _BELIEF + self._own(cell, kv_tokens) * weight) / (_BELIEF + weight)

    def _own(self, cell: list[float], kv_tokens: int) -> float:
        """A cell's mean, moved along KV."""
        return max(cell[1] + self._weights[_KV] * (kv_tokens - cell[2]), 0.2 * cell[1])

    def _line(self, gamma: int, batch_size: int, kv_tokens: int) -> float:
        """The regression; written out, since most of its features are 0 and every decision asks for several arms."""
        weights = self._weights
        tokens = batch_size * (gamma + 1)
        seconds = weights[0] + weights[1] * tokens
        for index, knee in enumerate(_KNEES, 2):
            if tokens <= knee:
                break
            seconds += weights[index] * (tokens - knee)
        seconds += weights[_KV] * kv_tokens
        if gamma:
            seconds = seconds + weights[_KV + 1] + weights[_DRAFT] * gamma + weights[_DRAFT + 1] * (gamma * batch_size)
        return max(seconds, 1e-6)

    def relative_error(self, gamma: int, batch_size: int) -> float:
        """Standard error of `predict`, relative to it: the regression's bias and the cell's noise."""
        cell = self._cells.get((batch_size, gamma))
        weight = self._weight(cell)
        bits = batch_size.bit_length()
        line_error = self._line_errors.get(bits, _LINE_ERROR)
        if not self.tried(gamma, batch_size):
            # Steps of the other side alone do not tell what of them is the draft's share, what the rows'.
            line_error += _FAR_ERROR * min((abs(bits - other) for other in self._tried[gamma > 0]), default=bits)
        beyond = batch_size * (gamma + 1) / self._most_tokens
        if beyond > 1.0:
            line_error += _BEYOND_ERROR * math.log2(beyond)
        # The noise is the mean's, so it counts for as much as the mean does.
        return (line_error * _BELIEF + self._noise * math.sqrt(weight)) / (_BELIEF + weight)

    def least_plain(self, batch_size: int) -> float:
        """Seconds that a plain step takes at the least: as long as the shortest ever seen of batches half as large."""
        bits = batch_size.bit_length()
        shortest = max((seconds for other, seconds in self._shortest.items() if other < bits), default=0.0)
        return shortest * math.exp(self._pace)

    def tried(self, gamma: int, batch_size: int) -> bool:
        """Whether a step on `gamma`'s side of off/on was ever seen at a batch of this size, to a factor of two."""
        return batch_size.bit_length() in self._tried[gamma > 0]

    def samples(self, gamma: int, batch_size: int) -> float:
        """Steps the cell still remembers, faded."""
        return self._weight(self._cells.get((batch_size, gamma)))

    def _weight(self, cell: list[float] | None) -> float:
        """A cell's samples, faded by the server's steps since its last one."""
        return 0.0 if cell is None else cell[0] * _CELL_FADE ** (self._steps - cell[3])

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent on the discounted normal equations.

        Steps are taken in several at a time: one by one they would cost more than they teach.
        """
        pending = np.array(self._pending)
        rows = _features(pending) / pending[:, 3:4]  # relative errors: the whole step's target is 1
        weights_of = np.asarray(_KEEP ** np.arange(len(rows) - 1, -1, -1), dtype=np.float64)
        self._normal, self._target = self._normal * _KEEP ** len(rows), self._target * _KEEP ** len(rows)
        known = pending[:, 4] > 0.0
        if known.any():
            share = (pending[:, 4] / pending[:, 3])[known]
            self._add(rows[known] * _OF_DRAFT, share, weights_of[known])
            self._add(rows[known] * ~_OF_DRAFT, 1.0 - share, weights_of[known])
            rows, weights_of = rows[~known], weights_of[~known]
        self._add(rows, np.ones(len(rows)), weights_of)
        self._pending.clear()
        normal, target = self._normal.tolist(), self._target.tolist()
        normal[_KV][_KV] *= 1.0 + _KV_RIDGE
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

    def _add(self, rows: _Floats, target: _Floats, weight: _Floats) -> None:
        """Adds equations to the sums: `rows` [N, features] times the coefficients is `target` [N]."""
        discounted = rows * weight[:, None]
        self._normal = self._normal + discounted.T @ rows
        self._target = self._target + (discounted * target[:, None]).sum(0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "pending": [list(step) for step in self._pending],
            "normal": self._normal.tolist(),
            "target": self._target.tolist(),
            "weights": list(self._weights),
            "cells": [[*key, *cell] for key, cell in self._cells.items()],
            "steps": self._steps,
            "pace": self._pace,
            "noise": self._noise,
            "line_errors": [list(pair) for pair in self._line_errors.items()],
            "tried": [sorted(bits) for bits in self._tried],
            "most_tokens": self._most_tokens,
            "shortest": [list(pair) for pair in self._shortest.items()],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self._pending = [(int(g), int(b), int(kv), float(s), float(draft)) for g, b, kv, s, draft in saved["pending"]]
        self._normal = np.array(saved["normal"], dtype=np.float64)
        self._target = np.array(saved["target"], dtype=np.float64)
        self._weights = [float(value) for value in saved["weights"]]
        self._cells = {(int(b), int(g)): [float(v) for v in cell] for b, g, *cell in saved["cells"]}
        self._steps = int(saved["steps"])
        self._pace = float(saved["pace"])
        self._noise = float(saved["noise"])
        self._line_errors = {int(bits): float(error) for bits, error in saved["line_errors"]}
        self._tried = set(map(int, saved["tried"][0])), set(map(int, saved["tried"][1]))
        self._most_tokens = int(saved["most_tokens"])
        self._shortest = {int(bits): float(seconds) for bits, seconds in saved["shortest"]}


def _features(steps: _Floats) -> _Floats:
    """What the coefficients multiply, [steps, `_FEATURES`], of rows that begin with (gamma, B, KV)."""
    gamma, batch_size, kv_tokens = steps[:, 0], steps[:, 1], steps[:, 2]
    tokens = batch_size * (gamma + 1.0)
    over = np.maximum(tokens - np.array(_KNEES)[:, None], 0.0)
    return np.stack((np.ones_like(tokens), tokens, *over, kv_tokens, gamma > 0, gamma, gamma * batch_size), axis=1)
