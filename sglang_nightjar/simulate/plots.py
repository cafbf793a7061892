"""Pictures of runs; matplotlib is asked for only here."""

from collections.abc import Sequence

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.scenario import Result

_PANELS = {"tokens": "tokens/s", "batch": "running requests", "gamma": "gamma", "free_share": "free KV share"}


def plot_timelines(results: Sequence[Result], path: str) -> None:
    """One line per policy over time: throughput, batch, gamma and free KV, into the image file `path`."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    figure, axes = pyplot.subplots(len(_PANELS), 1, figsize=(9, 10), sharex=True)
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
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from None
    pyplot.close(figure)
