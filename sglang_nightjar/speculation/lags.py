"""How far the draft lags behind the running requests, and their tokens: asked before every decode step.

To look it up is to look at every slot of every request. But where only the target decodes, what the draft has seen of a
request stays as it is. So that is looked up after a step of any other kind, and remembered until the next one; and
while the batch is the same one, every request is just as many tokens further as the first.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_nightjar.speculation.draft_state import DraftState
from sglang_nightjar.speculation.same_batch import SameBatch
from sglang_nightjar.speculation.transfer import host_lengths


class KnownLags:
    """Of the requests that run, by request id."""

    def __init__(self, state: DraftState, look_up: Callable[[Any], torch.Tensor]) -> None:
        """`look_up`: tokens of each request of an SGLang batch that the draft has not seen, int64 [B], on
        the host."""
        self._state, self._look_up = state, look_up
        self._seen: dict[str, int] = {}  # tokens of each request, from its begin
        self._losses = state.losses
        self._same = SameBatch()
        self._largest = self._total = self._first = 0  # the answer, and the first request's tokens then

    def forget(self) -> None:
        """Something else than a plain decode has been made."""
        self._seen.clear()
        self._same.forget()

    def look(self, batch: Any) -> tuple[int, int]:
        """The largest lag of any request in `batch`, and the tokens of all of them."""
        if self._losses != self._state.losses:
            self.forget()
            self._losses = self._state.losses
        lengths = host_lengths(batch)
        first = int(lengths[0])
        if not self._same(batch):
            each = lengths.tolist()
            self._largest, self._total, self._first = self._largest_of(batch, each), sum(each), first
        further = first - self._first
        return self._largest + further, self._total + further * len(batch.reqs)

    def _largest_of(self, batch: Any, lengths: list[int]) -> int:
        seen = self._seen
        if all(req.rid in seen for req in batch.reqs):
            return max(length - seen[req.rid] for req, length in zip(batch.reqs, lengths, strict=True))
        lags: list[int] = self._look_up(batch).tolist()
        for req, length, lag in zip(batch.reqs, lengths, lags, strict=True):
            seen[req.rid] = length - lag
        return max(lags)
