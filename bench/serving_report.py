"""A table and a plot of what `bench/serving.py` measured."""

import statistics
from pathlib import Path
from typing import Any

# Column -> (figure of a sample, digits).
COLUMNS = {
    "tokens/s": ("throughput", 1),
    "to the end": ("output_throughput", 1),
    "goodput/s": ("goodput", 2),
    "SLO met": ("slo_attainment", 3),
    "TTFT ms": ("mean_ttft_ms", 0),
    "p50": ("median_ttft_ms", 0),
    "p99": ("p99_ttft_ms", 0),
    "TPOT ms": ("mean_tpot_ms", 1),
    "p50 ": ("median_tpot_ms", 1),
    "p99 ": ("p99_tpot_ms", 1),
    "E2E s": ("mean_e2e_latency_ms", 2),
    "p50  ": ("median_e2e_latency_ms", 2),
    "p99  ": ("p99_e2e_latency_ms", 2),
    "accept length": ("accept_length", 2),
    "KV slots": ("kv_slots", 0),
    "evicted": ("evictions", 0),
    "reloaded": ("reloads", 0),
    "preempted": ("preemptions", 0),
    "device": ("device_share", 3),
    "switches": ("switches", 0),
}
_SECONDS = ("E2E s", "p50  ", "p99  ")


def summary(samples: list[dict[str, Any]]) -> str:
    """Medians over the repeats as Markdown, one table per load; then what was answered differently.

    tokens/s and goodput are of the time while requests came; `to the end` also has the last ones' end. Columns that
    no sample has are left out, as of files of earlier versions.
    """
    lines = []
    for load in dict.fromkeys(sample["load"] for sample in samples):
        own = [sample for sample in samples if sample["load"] == load]
        shown = {head: how for head, how in COLUMNS.items() if any(s.get(how[0]) is not None for s in own)}
        levels = [level for level in ("L1", "L1*") if all(level in sample for sample in own)]
        heads = ["policy", *(head.strip() for head in shown), "steps by gamma"]
        heads += [head for level in levels for head in (f"L2/{level} tokens/s", "TTFT", "TPOT")]
        requests = f", {own[0]['requests']} requests" if "requests" in own[0] else ""
        lines += ["", f"**{load}**{requests}", "", "| " + " | ".join(heads) + " |"]
        lines.append("| :-- |" + " ---: |" * len(shown) + " :-- |" + " ---: |" * (3 * len(levels)))
        for policy in dict.fromkeys(sample["policy"] for sample in own):
            mine = [sample for sample in own if sample["policy"] == policy]
            cells = [policy]
            for head, (name, digits) in shown.items():
                value = middle(mine, name)
                value = value / 1e3 if value is not None and head in _SECONDS else value
                cells.append("" if value is None else f"{value:.{digits}f}")
            cells.append(" ".join(map(str, mine[-1].get("steps_by_gamma", []))))
            for level in levels:
                names = ("throughput", "mean_ttft_ms", "mean_tpot_ms")
                cells += [f"{statistics.median(s[name] / s[level][name] for s in mine):.3f}" for name in names]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", answers(samples)] if any("answers" in sample for sample in samples) else lines)


def middle(samples: list[dict[str, Any]], name: str) -> float | None:
    """The median of a figure, None where no sample has it."""
    values = [sample[name] for sample in samples if sample.get(name) is not None]
    return statistics.median(values) if values else None


def answers(samples: list[dict[str, Any]]) -> str:
    """How many answers there were to requests that another policy was sent too, and how many were another text."""
    first: dict[tuple[str, int], list[int]] = {}
    compared = different = 0
    for sample in samples:
        if "answers" not in sample:
            continue
        expected = first.setdefault((sample["load"], sample["repeat"]), sample["answers"])
        if expected is not sample["answers"]:
            compared += len(expected)
            different += sum(a != b for a, b in zip(expected, sample["answers"], strict=True))
    return f"{compared} answers compared with another policy's to the same request: {different} differ"


def moves_table(made: dict[str, list[dict[str, Any]]]) -> str:
    """Every move of the draft (`journals.moves`) as Markdown, by server; nothing where there was none."""
    heads = ("server", "move", "at s", "s", "drained s", "pause ms", "decode steps", "longest / median", "slots",
             "moved", "dropped", "copied MiB", "at once MiB")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "| :-- | :-- |" + " ---: |" * (len(heads) - 2)]
    for server, own in made.items():
        for move in own:
            outcome = "" if move["outcome"] == "done" else f" ({move['outcome']})"
            drained, pause, longest = move["phases"].get("drain"), move["pause_s"], move["longest_over_median"]
            cells = (
                server, move["kind"] + outcome, f"{move['began_s']:.1f}", f"{move['seconds']:.2f}",
                "" if drained is None else f"{drained:.2f}", "" if pause is None else f"{pause * 1e3:.1f}",
                str(move["decode_steps"]), "" if longest is None else f"{longest:.2f}",
                " to ".join(map(str, move["slots"])), str(move["moved_slots"]), str(move["dropped_slots"]),
                f"{move['copied_bytes'] / 2**20:.1f}", f"{move['most_copied_bytes'] / 2**20:.1f}",
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput by load and policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4))
    samples = result["samples"]
    loads = list(dict.fromkeys(sample["load"] for sample in samples))
    for policy in dict.fromkeys(sample["policy"] for sample in samples):
        values = [
            statistics.median(s["output_throughput"] for s in samples if (s["policy"], s["load"]) == (policy, load))
            for load in loads
        ]
        axis.plot(loads, values, marker="o", label=policy)
    axis.set_ylabel("output tokens/s")
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
