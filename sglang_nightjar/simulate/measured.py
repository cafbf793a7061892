"""Step times from measured points, for machines without a roofline.

The file is JSON, every time in seconds:

    {"name": "my-machine", "source": "how and when this was measured",
     "batches": [1, 2, 4, 8], "gammas": [0, 1, 3],
     "seconds": [[row of gamma 0: one per batch], [row of gamma 1], [row of gamma 3]],
     "prefill_token_s": 1e-3, "prefill_step_s": 0.0, "draft_token_s": 2e-4, "kv_token_s": 0.0,
     "slots_resident": 20000, "slots_evicted": 26000, "relocate_slot_s": 1e-6, "reload_s": 0.1}

`seconds[g][b]` is a whole decode step at gamma `gammas[g]` and `batches[b]` requests, all
drafting; a prefill takes `prefill_step_s`, and so much more per token. Between points, time is
linear in the batch and in gamma; beyond the last batch it goes on at the slope of the last two
(gamma beyond the last is refused).
"""

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.fields import Count, CountOrNone, NotNegative, Positive, decode_json, read_bytes

Batches = Annotated[tuple[Count, ...], msgspec.Meta(min_length=2)]
Gammas = Annotated[tuple[CountOrNone, ...], msgspec.Meta(min_length=1)]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's contents; see the module's docstring."""

    name: str
    source: str
    batches: Batches
    gammas: Gammas
    seconds: tuple[tuple[Positive, ...], ...]
    prefill_token_s: NotNegative
    draft_token_s: NotNegative
    slots_resident: Count
    slots_evicted: Count
    kv_token_s: NotNegative = 0.0
    prefill_step_s: NotNegative = 0.0
    relocate_slot_s: NotNegative = 0.0
    reload_s: NotNegative = 0.0


def read_measured(path: Path) -> "MeasuredCost":
    """The cost the file describes; `UserError` names the field that is wrong."""
    points = decode_json(read_bytes(path, "measured points"), Measured, str(path))
    for field, values in (("batches", points.batches), ("gammas", points.gammas)):
        if list(values) != sorted(set(values)):
            raise UserError(f"{path}: field {field} must rise from value to value")
    if points.gammas[0] != 0:
        raise UserError(f"{path}: field gammas must begin with 0, the step without speculation")
    shape = (len(points.gammas), len(points.batches))
    if len(points.seconds) != shape[0] or any(len(row) != shape[1] for row in points.seconds):
        raise UserError(f"{path}: field seconds must have {shape[0]} rows (gammas) of {shape[1]} numbers (batches)")
    if points.slots_evicted < points.slots_resident:
        raise UserError(f"{path}: field slots_evicted must not be below slots_resident")
    return MeasuredCost(points)


class MeasuredCost:
    """The same questions as `roofline.StepCost` answers, from `points`."""

    def __init__(self, points: Measured) -> None:
        self.points = points
        self.max_gamma = points.gammas[-1]
        rows = np.array(points.seconds)
        every = np.arange(self.max_gamma + 1)
        # One row per gamma; within a row, `_at` interpolates over the batch.
        self._rows = [[float(np.interp(g, points.gammas, rows[:, b])) for b in range(rows.shape[1])] for g in every]
        self._batches = [float(batch) for batch in points.batches]

    def _at(self, gamma: int, batch: float) -> float:
        row, batches = self._rows[gamma], self._batches
        if batch <= batches[0]:
            return row[0]
        upper = 1
        while upper < len(batches) - 1 and batches[upper] < batch:
            upper += 1
        share = (batch - batches[upper - 1]) / (batches[upper] - batches[upper - 1])
        return max(row[upper - 1] + share * (row[upper] - row[upper - 1]), 1e-9)

    def slots(self, resident: bool) -> int:
        return self.points.slots_resident if resident else self.points.slots_evicted

    def step_s(
        self,
        batch: int,
        gamma: int,
        kv_tokens: float,
        *,
        drafters: int | None = None,
        verify_tokens: int | None = None,
        prefill_tokens: int = 0,
    ) -> float:
        """A decode step. Where not all is drafted or verified, so much less is added to the step at gamma 0."""
        share = 1.0
        if gamma > 0 and batch > 0:
            if drafters is not None:
                share = drafters / batch
            if verify_tokens is not None:
                share = min(share, (verify_tokens - batch) / (batch * gamma))
        plain = self._at(0, batch)
        seconds = plain + share * (self._at(gamma, batch) - plain)
        return seconds + self.points.kv_token_s * kv_tokens + self.points.prefill_token_s * prefill_tokens

    def prefill_s(self, tokens: int, kv_tokens: float, draft: bool) -> float:
        per_token = self.points.prefill_token_s + (self.points.draft_token_s if draft else 0.0)
        return max(self.points.prefill_step_s + per_token * tokens, 1e-9)

    def catchup_s(self, tokens: int, kv_tokens: float) -> float:
        return self.points.draft_token_s * tokens

    def relocate_s(self, slots: float) -> float:
        return self.points.relocate_slot_s * slots

    def reload_s(self) -> float:
        return self.points.reload_s
