"""What the CUDA kernels take on a GPU, against the time in which its memory could move their bytes.

    scripts/python bench/kernels.py --json kernels.json

The floor of a kernel is the bytes its module says it moves, at the bandwidth of a device-to-device
copy measured in the same run (bytes read and written). Times are medians of CUDA events, the L2 cache
written over before each run. `device` is the launch with its small argument copies, `call` the whole
function with its checks on the host. Every result is compared with what it must be.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# In place of this script's folder, where `platform.py` would shadow the standard library's.
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "bench"))  # last, for the same reason
import torch  # noqa: E402
from machine import machine  # noqa: E402
from triton.testing import do_bench  # noqa: E402

from sglang_nightjar.kernels.draft_lens import draft_lens, set_valid  # noqa: E402
from sglang_nightjar.kernels.kv_relocate import kv_relocate, mover, row_table  # noqa: E402

MOVES = (16, 1_000, 10_000)
# Dtype and row of one KV slot in one buffer: 8 heads of 128 in bfloat16, the same in fp8, a small model's 3 of 64.
ROWS = ((torch.bfloat16, (8, 128)), (torch.float8_e4m3fn, (8, 128)), (torch.bfloat16, (3, 64)))
LENGTHS = ((1, 4_096), (32, 4_096), (128, 4_096), (512, 1_024), (8, 131_072))  # requests and tokens of each
UPDATES = (64, 4_096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--slots", type=int, default=24_000, help="of the KV pool that is moved in")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/kernels.py times CUDA kernels and torch sees no GPU here; run it on a machine with one")
    if options.slots < 2 * max(MOVES):
        sys.exit(f"--slots {options.slots} is too small: {max(MOVES)} slots move into as many others")

    device = torch.device("cuda", torch.cuda.current_device())
    bandwidth = copy_bandwidth(device)
    rows = [
        *bench_kv_relocate(device, options.layers, options.slots),
        *bench_draft_lens(device),
        *bench_set_valid(device),
    ]
    for row in rows:
        row["floor_us"] = row["bytes"] / bandwidth * 1e6
    about = {**machine(), "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    result = {"machine": about, "copy_bytes_per_s": bandwidth, "kernels": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(report(result))


def copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / (median_us(lambda: target.copy_(source)) / 1e6)


def median_us(work: Callable[[], Any]) -> float:
    return 1e3 * float(do_bench(work, return_mode="median"))


def bench_kv_relocate(device: torch.device, layers: int, slots: int) -> list[dict[str, Any]]:
    """Slots all over the upper half into slots all over the lower half, as a contraction moves them."""
    found = []
    generator = torch.Generator().manual_seed(1)
    for dtype, shape in ROWS:
        buffers = [
            torch.randint(0, 100, (slots, *shape), dtype=torch.uint8, device=device).to(dtype)
            for _ in range(2 * layers)
        ]
        row_bytes = buffers[0][0].nbytes
        for moves in MOVES:
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


def bench_draft_lens(device: torch.device) -> list[dict[str, Any]]:
    """Requests whose draft has seen all but the last token, their slots in any order."""
    found = []
    for requests, length in LENGTHS:
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


def said(row: dict[str, Any]) -> dict[str, Any]:
    print(f"[bench] {row}", file=sys.stderr, flush=True)
    return row


def report(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    about = result["machine"]
    lines = [
        f"{about['gpu']}, a copy moves {result['copy_bytes_per_s'] / 1e9:.0f} GB/s, torch {about['torch']}, "
        f"{about['date']}, commit {about['commit']}; microseconds",
        "",
        "| kernel | case | MB moved | floor | device | device / floor | GB/s | call |",
        "| :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["kernels"]:
        device_us, floor_us = row["device_us"], row["floor_us"]
        figures = (
            f"{floor_us:.1f} | {device_us:.1f} | {device_us / floor_us:.2f} | {row['bytes'] / device_us / 1e3:.0f}"
        )
        lines.append(
            f"| {row['kernel']} | {row['case']} | {row['bytes'] / 1e6:.2f} | {figures} | {row['call_us']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
