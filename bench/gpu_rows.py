"""What `gpu_check.py` finds: rows, their table and their JSON."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OK, FAILED, SKIPPED, REFUSED = "ok", "FAILED", "skipped", "refused"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing checked.

    Attributes:
        part: which of the script's parts it belongs to.
        check: what was checked.
        result: `ok`, `FAILED` (it is wrong), `skipped` (nothing to check it with) or `refused` (a server says that
            it cannot do this).
        figure: what was measured, in words with units, or why there is nothing.
        values: the same as numbers, for the JSON.
    """

    part: str
    check: str
    result: str = OK
    figure: str = ""
    values: dict[str, float] = field(default_factory=dict)


def rows_of(part: str, work: Callable[[], Sequence[Row]], say: Callable[[str], None]) -> list[Row]:
    """Runs one part. What it raises becomes a row, so that the parts after it still run."""
    say(f"{part} ...")
    begin = time.perf_counter()
    try:
        found = list(work())
    except Exception as error:
        say(traceback.format_exc())
        lines = str(error).strip().splitlines() or [""]
        found = [Row(part, "runs to its end", FAILED, f"{type(error).__name__}: {lines[0]}")]
    say(f"{part}: {time.perf_counter() - begin:.1f} s")
    return found


def failed(rows: Sequence[Row]) -> bool:
    """Whether anything is wrong."""
    return any(row.result == FAILED for row in rows)


def table(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """A Markdown table under a line that says where and when."""
    where = f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, {about['date']}"
    return f"{where}, commit {about['commit']}\n\n{rows_table(rows)}"


def rows_table(rows: Sequence[Row]) -> str:
    """The table alone."""
    lines = [
        "| part | check | result | figure |",
        "| :--- | :--- | :--- | :--- |",
        *(f"| {row.part} | {row.check} | {row.result} | {row.figure.replace('|', '/')} |" for row in rows),
    ]
    return "\n".join(lines)


def as_json(rows: Sequence[Row], about: dict[str, Any]) -> dict[str, Any]:
    """For `--json`."""
    return {"machine": about, "failed": failed(rows), "rows": [asdict(row) for row in rows]}
