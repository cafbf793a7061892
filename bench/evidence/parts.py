"""Tables of the benchmarks that measure one part: linears, fixed gammas, the tax, deciding, kernels, a GPU's checks.

The benchmarks print these tables too.
"""

from typing import Any

from gpu_rows import Row
from gpu_rows import rows_table as gpu_table

from sglang_nightjar.simulate.table import markdown


def linears(data: dict[str, Any]) -> str:
    """All linears of one forward, by rows and method."""
    rows = [
        (
            str(row["rows"]),
            *(f"{row[key]:.1f}" for key in ("plain_ms", "packed_ms", "int8_ms")),
            f"{row['packed_speedup']:.2f}",
        )
        for row in data["linear"]
    ]
    return markdown(("rows", "plain ms", "prepacked ms", "int8 ms", "plain / prepacked"), rows)


def servers(data: dict[str, Any]) -> str:
    """Fixed gammas by concurrency, and which is the fastest at each."""
    found = data["servers"]
    rows = [
        (
            str(row["concurrency"]),
            row["gamma"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['accept_length']:.2f}",
            f"{row['speedup']:.2f}",
        )
        for row in found
    ]
    heads = ("concurrency", "gamma", "tokens/s", "accept length", f"against {found[0]['gamma']}")
    # The sentence this project exists for: where speculation stops paying.
    best = {
        concurrency: max((row for row in found if row["concurrency"] == concurrency), key=lambda r: r["tokens_per_s"])
        for concurrency in dict.fromkeys(row["concurrency"] for row in found)
    }
    fastest = ", ".join(f"{row['gamma']} at concurrency {c}" for c, row in best.items())
    return f"{markdown(heads, rows, left=0)}\n\nFastest gamma: {fastest}."


def tax(data: dict[str, Any]) -> str:
    """A decode step at gamma 0 over one of a server that never had a draft."""
    rows = []
    for row in data["rows"]:
        figures = (f"{row['off_ms']:.1f}", f"{row['away_ms']:.1f}", f"{row['ratio']:.3f}")
        rows.append((str(row["batch"]), *figures, " ".join(f"{ratio:.3f}" for ratio in row["ratios"])))
    return markdown(("batch", "no draft, ms", "gamma 0, ms", "ratio", "of each pair"), rows, left=0)


def lossless(data: dict[str, Any]) -> str:
    """Answers compared with those of a server without speculation, while the draft left and returned."""
    heads = ("policy", "requests", "tokens", "mismatches", "evictions", "reloads", "moved_slots", "catchup_tokens")
    rows = [(row["policy"], *(f"{row[head]:,}" for head in heads[1:])) for row in data["rows"]]
    return markdown([head.replace("_", " ") for head in heads], rows)


def deciding(data: dict[str, Any]) -> str:
    """Microseconds of each policy per decode iteration."""
    keys = [f"{part}_{figure}_us" for part in ("decide", "observe", "both", "early") for figure in ("median", "p99")]
    heads = ("policy", "decide median", "p99", "observe median", "p99", "both median", "p99", "first 500 median", "p99")
    rows = [(row["policy"], *(f"{row[key]:.1f}" for key in keys)) for row in data["policies"]]
    text = f"Microseconds, over {data['steps']:,} steps of a synthetic server, gamma up to {data['max_gamma']}.\n\n"
    return text + markdown(heads, rows)


def kernels(data: dict[str, Any]) -> str:
    """CUDA kernels against the time in which the memory could move their bytes."""
    rows = []
    for row in data["kernels"]:
        device_us, floor_us = row["device_us"], row["floor_us"]
        figures = (f"{row['bytes'] / 1e6:.2f}", f"{floor_us:.1f}", f"{device_us:.1f}", f"{device_us / floor_us:.2f}")
        rate = f"{row['bytes'] / device_us / 1e3:.0f}"
        rows.append((row["kernel"], row["case"], *figures, rate, f"{row['call_us']:.1f}"))
    text = f"Microseconds; a copy moves {data['copy_bytes_per_s'] / 1e9:.0f} GB/s.\n\n"
    heads = ("kernel", "case", "MB moved", "floor", "device", "device / floor", "GB/s", "call")
    return text + markdown(heads, rows, left=2)


def gpu(data: dict[str, Any]) -> str:
    """What `scripts/gpu_check.sh` found."""
    return gpu_table([Row(**row) for row in data["rows"]])
