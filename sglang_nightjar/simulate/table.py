"""Plain tables, for the terminal and for Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned, numbers to the right, a rule below the header."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    right = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, cells)])


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """The same as a Markdown table; the first `left` columns to the left, the others to the right."""
    rule = ["| " + " | ".join([":--"] * left + ["---:"] * (len(header) - left)) + " |"]
    lines = ["| " + " | ".join(_text(value).replace("|", "/") for value in row) + " |" for row in (header, *rows)]
    return "\n".join(lines[:1] + rule + lines[1:])


def _text(value: object) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def met(name: str, value: float, bar: float, at_most: bool = False) -> dict[str, object]:
    """One requirement: its name, the figure, the bar, and whether it is met (NaN is not)."""
    passed = value <= bar if at_most else value >= bar
    return {"name": name, "value": value, "bar": bar, "at_most": at_most, "met": bool(passed)}


def bars(found: Sequence[dict[str, object]]) -> str:
    """The requirements as a table."""
    rows = [
        (b["name"], b["value"], f"{'<=' if b['at_most'] else '>='} {b['bar']}", "met" if b["met"] else "NOT MET")
        for b in found
    ]
    return table(("bar", "figure", "required", ""), rows)
