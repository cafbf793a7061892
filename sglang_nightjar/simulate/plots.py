"""Pictures of runs; matplotlib is asked for only here."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.scenario import Result

_PANELS = {
    "tokens": "tokens/s",
    "batch": "running requests",
    "queue": "waiting requests",
    "gamma": "gamma",
    "free_share": "free KV share",
    "residency": "residency (0: resident)",
}
_DPI = 80


def plot_timelines(results: Sequence[Result], path: str) -> None:
    """One line per policy over time, a panel for each of `_PANELS`, into the image file `path`."""
    pyplot = drawing()
    figure, axes = pyplot.subplots(len(_PANELS), 1, figsize=(9, 13), sharex=True)
    for result in results:
        times = result.timeline["time_s"]
        for axis, (column, label) in zip(axes, _PANELS.items(), strict=True):
            values = list(result.timeline[column])
            if column == "tokens":  # counted between two samples
                spans = [max(b - a, 1e-9) for a, b in zip([0.0, *times], times, strict=False)]
                values = [count / span for count, span in zip(values, spans, strict=True)]
            axis.plot(times, values, label=result.policy, linewidth=1)
            axis.set_ylabel(label)
    axes[0].legend(loc="upper right", fontsize="small")
    axes[0].set_title(f"{results[0].scenario} (L1, simulated)")
    axes[-1].set_xlabel("s")
    _save(pyplot, figure, path)


def plot_regret(summary: Sequence[dict[str, Any]], path: str) -> None:
    """Mean regret over the decisions, log-log, one panel per world; `summary` as `suite_regret` returns it."""
    pyplot = drawing()
    worlds = list(dict.fromkeys(entry["world"] for entry in summary))
    figure, axes = pyplot.subplots(1, len(worlds), figsize=(4 * len(worlds), 4), squeeze=False)
    for axis, world in zip(axes[0], worlds, strict=True):
        for entry in summary:
            if entry["world"] == world:
                means, halves = np.array(entry["mean"]), np.nan_to_num(np.array(entry["half_95"], float))
                means[means <= 0] = np.nan  # better than the oracle by chance: not on a logarithmic axis
                (line,) = axis.plot(entry["decisions"], means, label=entry["policy"], linewidth=1)
                low = np.maximum(means - halves, means / 10)
                axis.fill_between(entry["decisions"], low, means + halves, color=line.get_color(), alpha=0.2)
        axis.set(xscale="log", yscale="log", title=world, xlabel="decisions")
    axes[0][0].set_ylabel("regret, s per token (L1, simulated)")
    axes[0][0].legend(fontsize="small")
    _save(pyplot, figure, path)


def plot_closed(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Throughput over clients, against gamma 0, one panel per set-up; `rows` as `suite_paper` returns `closed`."""
    pyplot = drawing()
    set_ups = list(dict.fromkeys(row["set_up"] for row in rows))
    figure, axes = pyplot.subplots(1, len(set_ups), figsize=(4.5 * len(set_ups), 4), squeeze=False)
    for axis, set_up in zip(axes[0], set_ups, strict=True):
        found: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            if row["set_up"] == set_up:
                by_load = found.setdefault(row["policy"], {})
                by_load.setdefault(int(row["load"]), []).append(row["metrics"].throughput)
        plain = found.get("off") or next(iter(found.values()))
        for index, (policy, by_load) in enumerate(found.items()):
            gains = [float(np.mean(values) / np.mean(plain[clients])) for clients, values in by_load.items()]
            bold = policy == "nightjar"
            color = "black" if bold else pyplot.colormaps["tab20"](index)
            axis.plot(list(by_load), gains, label=policy, color=color, linewidth=2 if bold else 1)
        axis.set(title=set_up, xlabel="clients")
        axis.set_xscale("log", base=2)
    axes[0][0].set_ylabel("tokens/s against off (L1, simulated)")
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(pyplot, figure, path)


def drawing() -> Any:
    """matplotlib's pyplot, drawing into files; `UserError` where it is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    return pyplot


def _save(pyplot: Any, figure: Any, path: str) -> None:
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=_DPI)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from None
    pyplot.close(figure)
