"""The CUDA side of `catchup_plan` and `catchup_gather`: one launch each, nothing looked at on the host.

Roofline. The gather moves 32 bytes a token (4 + 4 read, 24 written, all of it in order within a request): 4,096
tokens are 131 KB, 0.03 us at 4.8 TB/s. The plan has no order to sort by: each request adds up what all those
before it take, B x 17 bytes read by B programs, which is 4.5 MB for 512 requests and comes from the L2 cache.
Both stay far below the 2 to 3 us that a launch takes, so there is nothing to win by fewer bytes.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sglang_nightjar.kernels.catchup import CatchUp

REQUESTS = 256  # looked at at once
TOKENS = 256  # that a program writes


@triton.jit
def added(a, b):
    return a + b


@triton.jit(do_not_specialize=["budget", "ordinary", "count"])
def share_budget(starts, ends, wanted, stops, budget, ordinary, count, REQUESTS: tl.constexpr):
    """Program b plans request b: what is left of the budget is what those that come before it do not take."""
    own = tl.program_id(0)
    start = tl.load(starts + own)
    end = tl.load(ends + own)
    lag = end - start
    before = tl.full((), 0, tl.int64)
    for first in range(0, count, REQUESTS):
        other = first + tl.arange(0, REQUESTS)
        live = other < count
        other_lag = tl.load(ends + other, mask=live, other=0) - tl.load(starts + other, mask=live, other=0)
        comes_first = (other_lag < lag) | ((other_lag == lag) & (other < own))
        counts = live & comes_first & (tl.load(wanted + other, mask=live, other=0) != 0)
        before += tl.reduce(tl.where(counts, tl.maximum(other_lag - ordinary, 0), 0), 0, added)
    left = tl.maximum(budget - before, 0)
    behind = tl.maximum(lag - ordinary, 0)
    stop = tl.where(behind <= left, end, start + left)
    tl.store(stops + own, tl.where(tl.load(wanted + own) != 0, stop, start))


@triton.jit(do_not_specialize=["count", "capacity"])
def list_tokens(
    history, req_to_token, rows, starts, stops, tokens, positions, slots, query_start,
    history_stride, slots_stride, count, capacity, REQUESTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (b, j) writes the j-th TOKENS tokens of request b; those of b = count write the zeros after all."""
    own = tl.program_id(0)
    offset = tl.full((), 0, tl.int64)
    for first in range(0, own, REQUESTS):
        other = first + tl.arange(0, REQUESTS)
        live = other < own
        lengths = tl.load(stops + other, mask=live, other=0) - tl.load(starts + other, mask=live, other=0)
        offset += tl.reduce(lengths, 0, added)
    if tl.program_id(1) == 0:
        tl.store(query_start + own, offset)
    step = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = offset + step < capacity
    if own == count:
        zeros = tl.full((TOKENS,), 0, tl.int64)
        tl.store(tokens + offset + step, zeros, mask=inside)
        tl.store(positions + offset + step, zeros, mask=inside)
        tl.store(slots + offset + step, zeros, mask=inside)
    else:
        row = tl.load(rows + own).to(tl.int64)
        position = tl.load(starts + own) + step
        inside = inside & (position < tl.load(stops + own))
        token = tl.load(history + row * history_stride + position, mask=inside, other=0)
        slot = tl.load(req_to_token + row * slots_stride + position, mask=inside, other=0)
        tl.store(tokens + offset + step, token.to(tl.int64), mask=inside)
        tl.store(positions + offset + step, position, mask=inside)
        tl.store(slots + offset + step, slot.to(tl.int64), mask=inside)


def plan(
    starts: torch.Tensor, ends: torch.Tensor, wanted: torch.Tensor, budget: int, ordinary: int, stops: torch.Tensor
) -> None:
    """`catchup_plan` into `stops`, all on one device and contiguous."""
    if len(starts):
        arguments = (starts, ends, wanted.view(torch.uint8), stops, budget, ordinary, len(starts))
        share_budget[(len(starts),)](*arguments, REQUESTS=REQUESTS)


def gather(
    history: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    found: "CatchUp",
) -> None:
    """`catchup_gather` into `found`, all on one device."""
    for name, table in (("history", history), ("req_to_token", req_to_token)):
        assert table.stride(1) == 1, f"{name} has strides {table.stride()}"
    capacity = len(found.tokens)
    grid = (len(rows) + 1, max(triton.cdiv(capacity, TOKENS), 1))
    list_tokens[grid](
        history, req_to_token, rows, starts, stops, found.tokens, found.positions, found.slots, found.query_start,
        history.stride(0), req_to_token.stride(0), len(rows), capacity, REQUESTS=REQUESTS, TOKENS=TOKENS,
    )  # fmt: skip
