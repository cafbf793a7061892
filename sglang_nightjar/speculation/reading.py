"""What the draft reads in a step: how much of each request's lag, which tokens, and a batch of only those requests.

All of it is planned on the host.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_nightjar.speculation.late_tokens import output_tokens
from sglang_nightjar.speculation.transfer import host_lengths, to_device

# A request that drafts every round is behind by its bonus token and, at most, the last draft.
ORDINARY_LAG = 2


def catchup_plan(
    starts: torch.Tensor, ends: torch.Tensor, wanted: torch.Tensor, budget: int
) -> tuple[torch.Tensor, int]:
    """Up to where each request is read in this step, int64 [B], and the tokens of it beyond the ordinary lag.

    Who lags least comes first, so that as many requests as possible draft again soon. All arguments on the host.
    """
    stops = starts.clone()
    extra = ends - starts - ORDINARY_LAG
    left = budget
    spent = 0
    for row in torch.argsort(extra, stable=True).tolist():
        if not wanted[row]:
            continue
        behind = max(int(extra[row]), 0)
        if behind <= left:
            stops[row] = ends[row]
            left -= behind
            spent += behind
        elif left > 0:
            stops[row] = starts[row] + left
            spent += left
            left = 0
    return stops, spent


def rows_of(batch: Any, rows: torch.Tensor) -> Any:
    """A view of `batch` with only some of its requests (`rows`: int64 on the host), as a draft forward reads it."""
    if len(rows) == len(batch.reqs):
        return batch
    index = to_device(rows, batch.seq_lens.device)
    part = copy.copy(batch)
    part.reqs = [batch.reqs[row] for row in rows.tolist()]
    part.req_pool_indices = batch.req_pool_indices[index]
    part.seq_lens = batch.seq_lens[index]
    part.seq_lens_cpu = host_lengths(batch)[rows]
    part.orig_seq_lens = None if batch.orig_seq_lens is None else batch.orig_seq_lens[index]
    return part


def committed_tokens(req: Any, start: int, stop: int, late: Mapping[str, Sequence[int]]) -> list[int]:
    """Tokens at positions `start` up to `stop` of a request; the last of all is the bonus token."""
    prompt = req.origin_input_ids
    first_output, last_output = max(start - len(prompt), 0), max(stop - len(prompt), 0)
    tokens = [*prompt[start:stop], *output_tokens(req, late, first_output, last_output)]
    assert len(tokens) == stop - start, f"request {req.rid}: tokens {start} to {stop} asked, {len(tokens)} committed"
    return tokens
