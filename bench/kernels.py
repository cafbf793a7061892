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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# In place of this script's folder, where `platform.py` would shadow the standard library's.
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "bench"))  # last, for the same reason
import evidence.parts  # noqa: E402
import torch  # noqa: E402
from kernel_cases import (  # noqa: E402
    MOVES,
    bench_catchup,
    bench_draft_lens,
    bench_kv_relocate,
    bench_set_valid,
    copy_bandwidth,
)
from machine import machine  # noqa: E402


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
        *bench_catchup(device),
    ]
    for row in rows:
        row["floor_us"] = row["bytes"] / bandwidth * 1e6
    about = {**machine(), "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    result = {"machine": about, "copy_bytes_per_s": bandwidth, "kernels": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(report(result))


def report(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    about = result["machine"]
    where = f"{about['gpu']}, torch {about['torch']}, {about['date']}, commit {about['commit']}"
    return f"{where}\n\n{evidence.parts.kernels(result)}"


if __name__ == "__main__":
    main()
