"""Checks, on one GPU and in under 10 minutes, what elsewhere could only be tested over a fake driver.

    scripts/gpu_check.sh --json gpu_check.json
    scripts/gpu_check.sh --model DIR --draft DIR      with servers: evict and reload under load

Parts: `arena` (virtual memory: commit, hand over, refuse), `reload` (pinned mirror: bandwidth, and what a
running stream notices of it), `kernels` (correctness, and bandwidth against a device-to-device copy), `graph`
(a captured CUDA graph replayed after its memory went and came back), `end-to-end` (needs SGLang with its CUDA
kernels, and two models). docs/gpu.md says how to read the table. Exit status: 0 where nothing FAILED, 1 where
something did or there is no GPU.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCH = str(ROOT / "bench")
if sys.path[0] == BENCH:  # run as a script: `platform.py` there would shadow the standard library's
    sys.path[0] = str(ROOT)
if BENCH not in sys.path:
    sys.path.append(BENCH)  # last, for the same reason
from gpu_rows import SKIPPED, Row, as_json, failed, rows_of, table  # noqa: E402

PARTS = ("arena", "reload", "kernels", "graph", "end-to-end")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ends the process with a message where it makes no sense."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which to run, of: {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--device", type=int, default=0, help="CUDA ordinal")
    parser.add_argument("--weights-mib", type=int, default=1024, help="weights reloaded in `reload`, MiB")
    parser.add_argument("--model", help="checkpoint of the target, for `end-to-end`")
    parser.add_argument("--draft", help="checkpoint of the draft, for `end-to-end`")
    parser.add_argument("--server-arguments", type=shlex.split, default=[], help="more of the server's own, in quotes")
    options = parser.parse_args(words)
    options.parts = options.parts.split(",")
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts has {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    if (options.model is None) != (options.draft is None):
        parser.error("--model and --draft go together; give both, or neither")
    if not 32 <= options.weights_mib <= 1 << 16:
        parser.error(f"--weights-mib is {options.weights_mib}; choose 32 to 65536")
    return options


def main() -> None:
    options = parse()
    torch = torch_with_gpu()
    if not 0 <= options.device < torch.cuda.device_count():
        sys.exit(f"gpu_check: --device {options.device} is not one of the {torch.cuda.device_count()} GPUs here")
    torch.cuda.set_device(options.device)
    about = describe(torch, options.device)
    begin, rows = time.perf_counter(), []
    for part in options.parts:
        rows += rows_of(part, work_of(part, options), say)
        if options.json:
            options.json.write_text(json.dumps(as_json(rows, about), indent=2) + "\n")
    print(table(rows, about))
    say(f"{time.perf_counter() - begin:.0f} s in all")
    sys.exit(1 if failed(rows) else 0)


def torch_with_gpu() -> Any:
    """torch, where it sees a GPU; else ends the process with one line."""
    try:
        import torch
    except ImportError:
        sys.exit(f"gpu_check: {sys.executable} has no torch; run scripts/gpu_check.sh, or set NIGHTJAR_PYTHON")
    if not torch.cuda.is_available():
        sys.exit("gpu_check: torch sees no GPU here, so nothing was checked; run it on a machine with one")
    return torch


def work_of(part: str, options: argparse.Namespace) -> Callable[[], Sequence[Row]]:
    """What to run for a part. Its imports come with it: where one is missing, the other parts still run."""

    def work() -> Sequence[Row]:
        if part == "end-to-end":
            if options.model is None:
                return [Row(part, "evict and reload under load", SKIPPED, "no --model and --draft")]
            from gpu_end_to_end import check_end_to_end

            return check_end_to_end(options.model, options.draft, options.server_arguments)
        import gpu_parts

        if part == "arena":
            return gpu_parts.check_arena(options.device)
        if part == "reload":
            return gpu_parts.check_reload(options.device, options.weights_mib << 20)
        if part == "kernels":
            return gpu_parts.check_kernels(options.device)
        return gpu_parts.check_graph(options.device)

    return work


def describe(torch: Any, ordinal: int) -> dict[str, Any]:
    """Where and on what this runs."""
    from machine import machine

    properties = torch.cuda.get_device_properties(ordinal)
    return {
        **machine(),
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def driver_version() -> str:
    """Of the kernel module, where it says so."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def say(message: str) -> None:
    print(f"[gpu_check] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
