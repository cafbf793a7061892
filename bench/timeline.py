"""One run of a server over time, from the journal it has written: load, throughput, gamma, KV pool, the draft's moves.

    scripts/python bench/timeline.py JOURNAL --plot run.png
    scripts/python bench/timeline.py JOURNAL.2 JOURNAL.1 JOURNAL --plot run.png      a rotated one, oldest first

A journal is what `--nightjar-journal FILE` makes rank 0 write. Times are the server's: emulated seconds of an
emulated device. Needs matplotlib.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
if sys.path[0] == HERE:
    del sys.path[0]  # a file of this folder would shadow the standard library's `platform`
sys.path.append(HERE)
from journals import Series, moves, series  # noqa: E402
from serving_report import moves_table  # noqa: E402

from sglang_nightjar.errors import UserError  # noqa: E402
from sglang_nightjar.observe.journal import read_journal  # noqa: E402
from sglang_nightjar.simulate.plots import drawing  # noqa: E402

_PANELS = (
    ("requests/s", {"arrivals_per_s": "arriving"}),
    ("tokens/s", {"tokens_per_s": "decoded"}),
    ("requests", {"batch": "running", "waiting": "waiting", "retracted": "preempted"}),
    ("gamma", {"gamma": "mean of the steps"}),
    ("KV slots", {"slots": "pool", "used": "in use"}),
)

_COLORS = {"leaving": "tab:orange", "evicted": "tab:red", "returning": "tab:green"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("journals", type=Path, nargs="+", help="of rank 0, oldest first")
    parser.add_argument("--plot", type=Path, required=True, help="PNG to write (needs matplotlib)")
    options = parser.parse_args()
    try:
        records = [record for path in options.journals for record in read_journal(path)]
        made = moves(records)
        draw(series(records), made, options.plot, options.journals[-1].name)
    except UserError as error:
        raise SystemExit(str(error)) from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}; give files that --nightjar-journal has written") from None
    except KeyError as error:
        raise SystemExit(f"no field {error} in a record: the journal is of another version") from None
    print(moves_table({options.journals[-1].name: made}))


def draw(run: Series, made: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draws what `journals.series` and `journals.moves` say of a run; where the draft was not resident is shaded.

    Raises:
        UserError: no step was made, or matplotlib is not installed.
    """
    if not run:
        raise UserError(f"{title} tells of no step")
    pyplot = drawing()
    figure, axes = pyplot.subplots(len(_PANELS), 1, figsize=(9, 11), sharex=True)
    for axis, (label, lines) in zip(axes, _PANELS, strict=True):
        for name, meaning in lines.items():
            axis.step(run["time_s"], [float("nan") if y is None else y for y in run[name]], where="pre", label=meaning)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        told: set[str] = set()
        for begin, end, residency in residencies(made, float(run["time_s"][-1] or 0.0)):
            once = None if residency in told else f"draft {residency}"
            axis.axvspan(begin, end, color=_COLORS[residency], alpha=0.25, linewidth=0, label=once)
            told.add(residency)
        axis.legend(loc="upper right", fontsize="small")
    axes[0].set_title(title)
    axes[-1].set_xlabel("s")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def residencies(made: Sequence[dict[str, Any]], end_s: float) -> list[tuple[float, float, str]]:
    """Begin and end (s from the first step) of every time the draft was not resident, and what it was."""
    spans = []
    away_s: float | None = None
    for move in made:
        begin, end = move["began_s"], move["began_s"] + move["seconds"]
        if away_s is not None:
            spans.append((away_s, begin, "evicted"))
        spans.append((begin, end, "leaving" if move["kind"] == "evict" else "returning"))
        back = (move["kind"], move["outcome"]) in (("reload", "done"), ("evict", "undone"))
        away_s = None if back else end
    if away_s is not None:
        spans.append((away_s, max(end_s, away_s), "evicted"))
    return spans


if __name__ == "__main__":
    main()
