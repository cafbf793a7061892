"""Catching up after a pause: which committed tokens each request's draft reads in this step, and where they lie.

Two parts. The plan shares a budget of tokens among the requests that lag; the gather lists the tokens,
positions and KV slots of what was planned, in the order of one ragged extend.

What the gather costs is memory traffic: a token is read (4 bytes, int32), and its slot (4 bytes), and three
int64 are written:

    tokens x 32 bytes

A budget of 4,096 tokens is 131 KB: 0.03 us at 4.8 TB/s, 7 us at 20 GB/s. The plan reads 17 bytes a request
for every request (512 requests: 4.5 MB, from the cache). On a GPU both are next to nothing beside a launch, so
each is one, and neither waits for the device: what is gathered has a length known on the host.
"""

from dataclasses import dataclass

import numba
import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class CatchUp:
    """What a draft's extend reads; all int64, on one device.

    Attributes:
        tokens, positions, slots: [capacity], request after request; zeros after the last one, which as a slot is
            the pool's dummy.
        query_start: [B + 1]: where each request's tokens begin, and where the last one's end.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor


def catchup_plan(
    starts: torch.Tensor, ends: torch.Tensor, wanted: torch.Tensor, budget: int, ordinary: int
) -> torch.Tensor:
    """Up to where each request is read in this step.

    Who lags least comes first, and of equals who comes first in the batch, so that as many requests as possible
    draft again soon; the first that does not fit gets what is left, and those after it wait.

    CPU: numba. CUDA: Triton, on the current stream. Either compiles at its first call (seconds).

    Args:
        starts, ends: int64 [B], contiguous: the first position the draft has not seen, and where the committed
            tokens end.
        wanted: bool [B], contiguous: which requests are to be read at all.
        budget: tokens, at least 0, to be read beyond the first `ordinary` of each request, which cost none.
    Returns:
        int64 [B]: `ends` of those read to their end; `starts` of those not read.
    """
    assert budget >= 0, f"a budget of {budget} tokens"
    stops = torch.empty_like(starts)
    if starts.is_cuda:
        from sglang_nightjar.kernels.catchup_triton import plan

        plan(starts, ends, wanted, budget, ordinary, stops)
    else:
        _plan(starts.numpy(), ends.numpy(), wanted.numpy(), budget, ordinary, stops.numpy())
    return stops


def catchup_gather(
    history: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    capacity: int,
) -> CatchUp:
    """Lists what each request reads: positions `starts` up to `stops`.

    CPU: numba. CUDA: Triton, on the current stream. Either compiles at its first call (seconds).

    Args:
        history: int32 or int64 [requests, context]: the committed token at each position, on the device: under
            overlap scheduling the newest are not on the host yet.
        req_to_token: int32 or int64 [requests, context]: the slot of each position.
        rows: int32 or int64 [B]: each request's row of both.
        starts, stops: int64 [B].
        capacity: at least as many tokens as there are: a plan's budget and the ordinary lag of every request. It
            is not looked up on a GPU, where whatever is beyond it would be left out.
    """
    empty = torch.empty((3, capacity), dtype=torch.int64, device=starts.device)
    query_start = torch.empty(len(starts) + 1, dtype=torch.int64, device=starts.device)
    found = CatchUp(empty[0], empty[1], empty[2], query_start)
    if starts.is_cuda:
        from sglang_nightjar.kernels.catchup_triton import gather

        gather(history, req_to_token, rows, starts, stops, found)
    else:
        total = int((stops - starts).sum())
        assert total <= capacity, f"{total} tokens to read, room for {capacity}"
        arrays = (tensor.numpy() for tensor in (history, req_to_token, rows, starts, stops, empty, query_start))
        _gather(*arrays)
    return found


def catchup_plan_reference(
    starts: torch.Tensor, ends: torch.Tensor, wanted: torch.Tensor, budget: int, ordinary: int
) -> torch.Tensor:
    """`catchup_plan`, one request at a time."""
    stops = starts.clone()
    left = budget
    for row in torch.argsort(ends - starts, stable=True).tolist():
        behind = max(int(ends[row] - starts[row]) - ordinary, 0)
        if wanted[row]:
            stops[row] = ends[row] if behind <= left else starts[row] + left
            left = max(left - behind, 0)
    return stops


def catchup_gather_reference(
    history: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    capacity: int,
) -> CatchUp:
    """`catchup_gather` in plain torch."""
    counts = stops - starts
    padding = torch.zeros(capacity - int(counts.sum()), dtype=torch.int64)
    spans = [torch.arange(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    tables = [
        [table[row, span].to(torch.int64) for row, span in zip(rows.tolist(), spans, strict=True)]
        for table in (history, req_to_token)
    ]
    tokens, positions, slots = (torch.cat([*parts, padding]) for parts in (tables[0], spans, tables[1]))
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return CatchUp(tokens, positions, slots, query_start)


@numba.njit(cache=True, nogil=True)
def _plan(starts, ends, wanted, budget, ordinary, stops):
    left = budget
    for row in np.argsort(ends - starts, kind="mergesort"):
        stops[row] = starts[row]
        if wanted[row]:
            behind = max(ends[row] - starts[row] - ordinary, 0)
            stops[row] = ends[row] if behind <= left else starts[row] + left
            left = max(left - behind, 0)


@numba.njit(cache=True, nogil=True)
def _gather(history, req_to_token, rows, starts, stops, out, query_start):
    at = 0
    for b in range(rows.shape[0]):
        query_start[b] = at
        row = rows[b]
        for position in range(starts[b], stops[b]):
            out[0, at] = history[row, position]
            out[1, at] = position
            out[2, at] = req_to_token[row, position]
            at += 1
    query_start[rows.shape[0]] = at
    out[:, at:] = 0
