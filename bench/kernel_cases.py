"""What the CUDA kernels are timed on, and compared with what they must give; needs a GPU."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.testing import do_bench

from sglang_nightjar.kernels.catchup import (
    CatchUp,
    catchup_gather,
    catchup_gather_reference,
    catchup_plan,
    catchup_plan_reference,
)
from sglang_nightjar.kernels.draft_lens import draft_lens, set_valid
from sglang_nightjar.kernels.kv_relocate import kv_relocate, mover, row_table

Rows = tuple[torch.dtype, tuple[int, int]]

MOVES = (16, 1_000, 10_000)
# Dtype and row of one KV slot in one buffer: 8 heads of 128 in bfloat16, the same in fp8, a small model's 3 of 64.
ROWS: tuple[Rows, ...] = (
    (torch.bfloat16, (8, 128)),
    (torch.float8_e4m3fn, (8, 128)),
    (torch.bfloat16, (3, 64)),
)
LENGTHS = ((1, 4_096), (32, 4_096), (128, 4_096), (512, 1_024), (8, 131_072))  # requests and tokens of each
UPDATES = (64, 4_096)
LAGS = ((32, 2), (128, 64), (512, 64), (8, 4_096))  # requests and tokens each is behind
ORDINARY = 2  # tokens of lag that cost no budget, as in the worker


def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / (median_us(lambda: target.copy_(source)) / 1e6)


def median_us(work: Callable[[], Any]) -> float:
    return 1e3 * float(do_bench(work, return_mode="median"))


def bench_kv_relocate(
    device: torch.device, layers: int, slots: int, counts: Sequence[int] = MOVES, rows: Sequence[Rows] = ROWS
) -> list[dict[str, Any]]:
    """Slots all over the upper half into slots all over the lower half, as a contraction moves them."""
    found = []
    generator = torch.Generator().manual_seed(1)
    for dtype, shape in rows:
        buffers = [
            torch.randint(0, 100, (slots, *shape), dtype=torch.uint8, device=device).to(dtype)
            for _ in range(2 * layers)
        ]
        row_bytes = buffers[0][0].nbytes
        for moves in counts:
            src = torch.randperm(slots // 2, generator=generator)[:moves] + (slots - slots // 2)
            dst = torch.randperm(slots // 2, generator=generator)[:moves]
            table, move = row_table(buffers), mover(device)
            row = {
                "kernel": "kv_relocate",
                "case": f"{moves} slots, {layers} layers, rows of {row_bytes} bytes ({str(dtype).split('.')[1]})",
                "bytes": 2 * moves * row_bytes * len(buffers),
                "device_us": median_us(lambda table=table, src=src, dst=dst, move=move: move(table, src, dst, device)),
                "call_us": median_us(lambda buffers=buffers, src=src, dst=dst: kv_relocate(buffers, src, dst)),
            }
            for buffer in buffers:
                as_bytes = buffer.view(torch.uint8)
                assert torch.equal(as_bytes[dst.to(device)], as_bytes[src.to(device)]), f"rows differ: {row['case']}"
            found.append(said(row))
    return found


def bench_draft_lens(device: torch.device, batches: Sequence[tuple[int, int]] = LENGTHS) -> list[dict[str, Any]]:
    """Requests whose draft has seen all but the last token, their slots in any order."""
    found = []
    for requests, length in batches:
        slots = torch.randperm(requests * length, device=device) + 1
        table = slots.view(requests, length).to(torch.int32)
        valid = torch.ones(requests * length + 1, dtype=torch.bool, device=device)
        valid[table[:, -1].long()] = False
        arguments = (
            valid,
            table,
            torch.arange(requests, device=device),
            torch.full((requests,), length, device=device),
        )
        taken = median_us(lambda arguments=arguments: draft_lens(*arguments))
        assert draft_lens(*arguments).eq(length - 1).all(), f"wrong lengths: {requests} requests of {length}"
        case = f"{requests} requests of {length} tokens"
        row = {
            "kernel": "draft_lens",
            "case": case,
            "bytes": requests * length * 5,
            "device_us": taken,
            "call_us": taken,
        }
        found.append(said(row))
    return found


def bench_set_valid(device: torch.device) -> list[dict[str, Any]]:
    """As many slots as a batch writes in a round, half of them marked and half cleared."""
    found = []
    for count in UPDATES:
        valid = torch.zeros(64 * count, dtype=torch.bool, device=device)
        slots = torch.randperm(len(valid), device=device)[:count]
        seen = torch.arange(count, device=device) % 2 == 0
        taken = median_us(lambda valid=valid, slots=slots, seen=seen: set_valid(valid, slots, seen))
        assert torch.equal(valid[slots], seen) and int(valid.sum()) == int(seen.sum()), f"wrong flags: {count} slots"
        row = {
            "kernel": "set_valid",
            "case": f"{count} slots",
            "bytes": count * 10,
            "device_us": taken,
            "call_us": taken,
        }
        found.append(said(row))
    return found


def bench_catchup(device: torch.device, batches: Sequence[tuple[int, int]] = LAGS) -> list[dict[str, Any]]:
    """Requests that lag by as many tokens each, at the end of a context twice as long; half the batch fits."""
    found = []
    for requests, lag in batches:
        generator = torch.Generator().manual_seed(requests)
        history, table = (
            torch.randint(0, 2**31 - 1, (requests, 2 * lag), generator=generator, dtype=torch.int32).to(device)
            for _ in range(2)
        )
        rows = torch.randperm(requests, generator=generator).to(device)
        starts, ends = (torch.full((requests,), length, device=device) for length in (lag, 2 * lag))
        wanted = torch.ones(requests, dtype=torch.bool, device=device)
        budget = (requests + 1) // 2 * lag
        capacity = budget + ORDINARY * requests
        stops = catchup_plan(starts, ends, wanted, budget, ORDINARY)
        gathered = catchup_gather(history, table, rows, starts, stops, capacity)
        case = f"{requests} requests that lag by {lag}"
        host = [tensor.cpu() for tensor in (history, table, rows, starts)]
        planned = catchup_plan_reference(host[3], ends.cpu(), wanted.cpu(), budget, ORDINARY)
        assert torch.equal(stops.cpu(), planned), f"wrong plan: {case}"
        expected = catchup_gather_reference(*host, planned, capacity)
        for name in CatchUp.__dataclass_fields__:
            assert torch.equal(getattr(gathered, name).cpu(), getattr(expected, name)), f"wrong {name}: {case}"

        def plan(starts=starts, ends=ends, wanted=wanted, budget=budget):  # type: ignore[no-untyped-def]
            return catchup_plan(starts, ends, wanted, budget, ORDINARY)

        def gather(arguments=(history, table, rows, starts, stops, capacity)):  # type: ignore[no-untyped-def]
            return catchup_gather(*arguments)

        tokens = int((planned - host[3]).sum())
        for kernel, work, nbytes in (("catchup_plan", plan, requests * 25), ("catchup_gather", gather, tokens * 32)):
            taken = median_us(work)
            row = {"kernel": kernel, "case": case, "bytes": nbytes, "device_us": taken, "call_us": taken}
            found.append(said(row))
    return found


def said(row: dict[str, Any]) -> dict[str, Any]:
    print(f"[bench] {row}", file=sys.stderr, flush=True)
    return row
