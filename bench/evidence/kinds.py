"""What a block of a document may show: its kind, and the forms of evidence it can be made of."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import overhead_report

from evidence import parts, served, simulated
from evidence.beside_paper import table as beside_paper
from evidence.pictures import Picture
from evidence.sources import Read, Source
from sglang_nightjar.errors import UserError

Made = Callable[..., str]


def _of_data(made: Callable[[dict[str, Any]], str]) -> Made:
    return lambda source: made(source.data)


def _overhead(source: Source) -> str:
    return overhead_report.table({**source.data, "machine": source.machine})


# Kind -> form of its source, and what makes the table of the source and of further words.
TABLES: dict[str, tuple[str, Made]] = {
    "closed": ("paper", simulated.closed),
    "closed-ratios": ("paper", simulated.closed_ratios),
    "poisson": ("paper", simulated.poisson),
    "dynamic": ("paper", simulated.dynamic),
    "crossover": ("paper", simulated.crossover),
    "all-loads": ("paper", simulated.loads),
    "regret": ("regret", simulated.regret),
    "changes": ("regret", simulated.changes),
    "scenario": ("scenario", simulated.scenario),
    "ladder": ("serving", served.ladder),
    "loads": ("serving", served.loads),
    "pool": ("serving", served.pool),
    "moves": ("serving", served.moves),
    "calibrate": ("calibrate", served.calibrate),
    "linears": ("platform", _of_data(parts.linears)),
    "gammas": ("platform", _of_data(parts.servers)),
    "tax": ("tax", _of_data(parts.tax)),
    "lossless": ("lossless", _of_data(parts.lossless)),
    "overhead": ("overhead", _overhead),
    "deciding": ("deciding", _of_data(parts.deciding)),
    "kernels": ("kernels", _of_data(parts.kernels)),
    "gpu": ("gpu", _of_data(parts.gpu)),
    "bars": ("", simulated.bars),  # of either suite
}


def sources_of(kind: str, words: Sequence[str]) -> Sequence[str]:
    """Names of the files a block is made of."""
    return words if kind == "beside-paper" else words[:1]


def render(kind: str, words: Sequence[str], read: Read, plots: Path) -> str | None:
    """What a block shows; None where there is nothing to make it of.

    Args:
        words: the source's name and what the kind needs besides; of `beside-paper`, all are sources.
        plots: folder of the pictures.
    Raises:
        UserError: no such kind, or its source is of another form.
    """
    if kind == "beside-paper":
        found = [source for name in words if (source := read(name)) is not None]
        return "\n\n".join([beside_paper(found), *(source.caption() for source in found)]) if found else None
    if kind not in TABLES and kind not in ("about", "picture"):
        known = ", ".join(("about", "beside-paper", "picture", *TABLES))
        raise UserError(f"no block is called {kind!r}; known: {known}")
    if not words:
        raise UserError(f"the block {kind!r} does not say of which file of docs/results it is")
    source = read(words[0])
    if source is None:
        return None
    if kind == "about":
        return source.about()
    if kind == "picture":
        return Picture(source, *words[1:]).shown(plots)
    return f"{source.caption()}\n\n{_table(kind, source, words[1:])}"


def _table(kind: str, source: Source, words: Sequence[str]) -> str:
    form, made = TABLES[kind]
    if form and source.form != form:
        raise UserError(f"the block {kind!r} is made of a {form} file, and {source.name}.json is a {source.form} file")
    try:
        return made(source, *words)
    except (KeyError, TypeError) as error:
        why = f"{source.name}.json has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"the block {' '.join((kind, source.name, *words))!r}: {why}") from None
