"""The CUDA side of `draft_lens` and `set_valid`: one launch each, nothing looked at on the host.

Roofline. The scan reads, of every position up to the first gap, 4 bytes of `req_to_token` in order and one byte
of `valid` by slot: 128 requests of 4,096 tokens are 2.6 MB, 0.5 us at 4.8 TB/s; 19 MB and 4 us where no two
slots share a 32-byte sector. One program scans one request, so a single long one is bound by latency, not by
bandwidth: 131,072 tokens are 64 dependent rounds of some 1 us each. An update moves 10 bytes a slot: 4,096 slots
are 41 KB. A launch takes 2 to 3 us, more than either floor.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048  # positions a program looks at at once


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def leading_valid(valid, req_to_token, stride, rows, seq_lens, out, BLOCK: tl.constexpr):
    """Program b scans request b, BLOCK positions at a time; `length` falls to the first gap, which ends the loop."""
    request = tl.program_id(0)
    table = req_to_token + tl.load(rows + request).to(tl.int64) * stride
    seq_len = tl.load(seq_lens + request).to(tl.int64)
    length = seq_len
    start = tl.full((), 0, tl.int64)
    while start < length:
        position = start + tl.arange(0, BLOCK)
        inside = position < seq_len
        slot = tl.load(table + position, mask=inside, other=0)
        seen = tl.load(valid + slot, mask=inside, other=1)
        length = tl.reduce(tl.where(seen == 0, position, seq_len), 0, smaller)
        start += BLOCK
    tl.store(out + request, length)


@triton.jit(do_not_specialize=["count"])
def store_seen(valid, slots, seen, count, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """`seen` is one flag for each slot, or with EACH false the one for all."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = index < count
    slot = tl.load(slots + index, mask=live, other=0)
    flag = tl.load(seen + index, mask=live, other=0) if EACH else seen
    tl.store(valid + slot, flag, mask=live)


def valid_prefix(
    valid: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor
) -> None:
    """`draft_lens` into `out`, all on one device."""
    assert req_to_token.stride(1) == 1, f"req_to_token has strides {req_to_token.stride()}"
    if len(rows):
        arguments = (valid.view(torch.uint8), req_to_token, req_to_token.stride(0), rows, seq_lens, out)
        leading_valid[(len(rows),)](*arguments, BLOCK=BLOCK, num_warps=8)


def scatter_valid(valid: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor | bool) -> None:
    """`set_valid` on one device; `slots`, and `seen` where it is a tensor, are contiguous."""
    if not slots.numel():
        return
    each = isinstance(seen, torch.Tensor)
    flags = seen.view(torch.uint8) if isinstance(seen, torch.Tensor) else int(seen)
    grid = (triton.cdiv(slots.numel(), BLOCK),)
    store_seen[grid](valid.view(torch.uint8), slots, flags, slots.numel(), EACH=each, BLOCK=BLOCK, num_warps=8)
