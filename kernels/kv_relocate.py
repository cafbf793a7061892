"""Moving live KV slots, in K and V of all layers at once, so that the tail of the pool can be given back.

What a call costs is memory traffic: every row is read once and written once, so it moves

    2 x n moves x row bytes x buffers    (two buffers per layer, K and V)

bytes, and no implementation takes less than that over the memory's bandwidth. 10,000 slots of a
model with 32 layers and rows of 2 KiB are 2.6 GB: 0.55 ms at 4.8 TB/s, 0.13 s at 20 GB/s.

Source: arXiv 2512.22420, elastic memory (contraction). Upstream seam: `MHATokenToKVPool.move_kv_cache`,
whose kernel wants equal rows in all buffers and cuts long lists into pieces of 256 moves or fewer, so that a
later piece reads what an earlier one wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numba import int64, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

Mover = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.device], None]


def kv_relocate(buffers: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Row `src[i]` of every buffer becomes its row `dst[i]`, as if all rows were read before any is written.

    Bytes are copied, so any dtype, head size and row size will do, and they may differ between
    buffers. No row is touched that is not named: the others need not be backed by memory.

    In a contraction the sources lie in the tail and the targets below it. Where a source is also
    a target (chains, cycles) those moves go first, through a temporary of one buffer's such rows;
    the rest read nothing that a move writes and need no order.

    CPU: numba, on `numba.get_num_threads()` threads; what `paged_attention` says about threading
    layers holds here. CUDA: one Triton launch on the current stream. Either compiles at its first
    call (seconds), so make one while the pool is still empty.

    Args:
        buffers: [slots, ...row] each, on one device, rows contiguous and without shared memory.
            A buffer viewed as [pages, ...page] is moved by page numbers.
        src: int64 [n], on any device; looked at on the host.
        dst: int64 [n], no slot twice.

    Raises:
        AssertionError: arguments that do not fit; nothing has been moved.
    """
    src, dst = src.cpu().contiguous(), dst.cpu().contiguous()
    _check(buffers, src, dst)
    if not buffers or not len(src):
        return
    overwritten = torch.isin(src, dst)
    if overwritten.any():
        relocate_reference(buffers, src[overwritten], dst[overwritten])
        src, dst = src[~overwritten], dst[~overwritten]
    if len(src):
        device = buffers[0].device
        mover(device)(row_table(buffers), src, dst, device)


def relocate_reference(buffers: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    """`kv_relocate` in plain torch, one buffer at a time through a temporary; checks nothing."""
    for buffer in buffers:
        rows = buffer.flatten(1).view(torch.uint8)
        rows[dst.to(buffer.device)] = rows[src.to(buffer.device)]


def expand_pages(src_pages: torch.Tensor, dst_pages: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of moved pages, in order: int64 [n] page numbers to int64 [n * page_size] slot numbers, twice."""
    within = torch.arange(page_size, device=src_pages.device)
    src, dst = ((pages.unsqueeze(1) * page_size + within).flatten() for pages in (src_pages, dst_pages))
    return src, dst


def row_table(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Address of each buffer, and the bytes from one row to the next and in a row: int64 [buffers, 3], on the CPU."""
    rows = [
        (buffer.data_ptr(), buffer.stride(0) * buffer.itemsize, buffer[0].numel() * buffer.itemsize)
        for buffer in buffers
    ]
    return torch.tensor(rows, dtype=torch.int64)


def mover(device: torch.device) -> Mover:
    """What moves rows on such a device, given `row_table`, int64 [n] sources and targets that do not overlap."""
    if device.type == "cpu":
        return _move_rows_cpu
    assert device.type == "cuda", f"buffers are on {device}; KV slots can be moved on cpu and cuda"
    from sglang_nightjar.kernels.kv_relocate_triton import move_rows

    return move_rows


def _check(buffers: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
    for name, slots in (("src", src), ("dst", dst)):
        assert slots.dtype == torch.int64 and slots.dim() == 1, (
            f"{name} is {slots.dtype} {list(slots.shape)}, not int64 [n]"
        )
    assert len(src) == len(dst), f"src has {len(src)} slots and dst {len(dst)}"
    if not len(src):
        return
    ranges = [(name, int(slots.min()), int(slots.max())) for name, slots in (("src", src), ("dst", dst))]
    for i, buffer in enumerate(buffers):
        assert buffer.device == buffers[0].device, f"buffer {i} is on {buffer.device}, buffer 0 on {buffers[0].device}"
        assert buffer.dim() >= 2, f"buffer {i} is {list(buffer.shape)}, not [slots, ...row]"
        for name, low, high in ranges:
            assert low >= 0 and high < len(buffer), (
                f"{name} is from {low} to {high}; buffer {i} has {len(buffer)} slots"
            )
        assert buffer[0].is_contiguous(), f"buffer {i} has rows {list(buffer[0].shape)} of strides {buffer[0].stride()}"
    targets, times = dst.unique(return_counts=True)
    assert len(targets) == len(dst), (
        f"dst has {len(dst)} slots but {len(targets)} different ones; slot {int(targets[times > 1][0])} is there "
        f"{int(times[times > 1][0])} times"
    )


@intrinsic
def _copy_bytes(typingctx: Any, to: Any, source: Any, count: Any) -> Any:
    """`count` bytes from one address to another; the two ranges must not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(parallel=True, cache=True, nogil=True)
def _copy_rows(table, src, dst):
    moves = src.size
    for i in prange(table.shape[0] * moves):
        item = int64(i)  # prange counts in uint64, which with int64 makes a float
        buffer, move = item // moves, item % moves
        address, stride, row_bytes = table[buffer, 0], table[buffer, 1], table[buffer, 2]
        _copy_bytes(address + dst[move] * stride, address + src[move] * stride, row_bytes)


def _move_rows_cpu(table: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, device: torch.device) -> None:
    _copy_rows(table.numpy(), src.numpy(), dst.numpy())
