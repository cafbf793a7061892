"""Recorded traffic: CSV of the Azure and BurstGPT formats, JSON lines of the Mooncake format.

The rules of scaling: time starts at the first request; when a mean rate is asked for, all gaps are
multiplied by one factor (the shape stays); lengths are multiplied by one factor, rounded, kept at
1 or more, and cut at `most`. Requests without any output token (BurstGPT's failures) are left out.
"""

import csv
import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.fields import read_bytes
from sglang_nightjar.simulate.workload import Trace, Work

Row = tuple[float, int, int]  # seconds, prompt tokens, output tokens


def read_trace(path: Path, scaling: Trace, duration_s: float, requests: int) -> Work:
    """The requests of the file that fall within `duration_s` after scaling, `requests` at most.

    Raises:
        UserError: the file cannot be read, its format is not known, or a line is malformed (file and line named).
    """
    rows = sorted(row for row in _rows(path) if row[2] > 0)
    if not rows:
        raise UserError(f"the trace {path} has no requests")
    table = np.array(rows, dtype=np.float64)
    times = table[:, 0] - table[0, 0]
    if scaling.rate is not None and times[-1] > 0:
        times *= (len(times) - 1) / (times[-1] * scaling.rate)
    keep = slice(0, min(int(np.searchsorted(times, duration_s, side="right")), requests))
    lengths = np.clip(np.rint(table[keep, 1:] * scaling.length_scale), 1, scaling.most).astype(np.int64)
    return Work(times[keep], lengths[:, 0].copy(), lengths[:, 1].copy())


def _rows(path: Path) -> Iterator[Row]:
    try:
        lines = read_bytes(path, "trace").decode().splitlines()
    except UnicodeDecodeError:
        raise UserError(f"the trace {path} is not UTF-8 text") from None
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        yield from _each(path, enumerate(lines, 1), _mooncake)
        return
    header = [name.strip() for name in first.split(",")]
    known: tuple[tuple[tuple[str, ...], Callable[[str], float]], ...] = ((_AZURE, _clock), (_BURSTGPT, float))
    found = next((entry for entry in known if all(column in header for column in entry[0])), None)
    if found is None:
        raise UserError(
            f"the trace {path} is of no known format: line 1 must have the columns {', '.join(_AZURE)} (Azure) or "
            f"{', '.join(_BURSTGPT)} (BurstGPT), or be a JSON object (Mooncake)"
        )
    columns, seconds = found
    at, prompt, output = (header.index(column) for column in columns)

    def parse(line: str) -> Row:
        cells = next(csv.reader([line]), [])
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} cells, not {len(header)} as in the header")
        return seconds(cells[at].strip()), int(cells[prompt]), int(cells[output])

    start = next(number for number, line in enumerate(lines) if line.strip()) + 1
    yield from _each(path, enumerate(lines[start:], start + 1), parse)


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


def _each(path: Path, lines: Iterator[tuple[int, str]] | enumerate[str], parse: Callable[[str], Row]) -> Iterator[Row]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = parse(line)
            if row[1] < 0 or row[2] < 0 or not np.isfinite(row[0]):
                raise ValueError("negative length or impossible time")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"the trace {path}, line {number}, cannot be read: {reason}") from None
        yield row


def _clock(text: str) -> float:
    """Seconds of `2023-11-16 18:15:46.6805900`; the fraction may have seven digits, which datetime does not read."""
    whole, _, fraction = text.partition(".")
    seconds = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp()
    digits = fraction.partition("+")[0].rstrip("Z")
    return seconds + (int(digits) / 10 ** len(digits) if digits else 0.0)


def _mooncake(line: str) -> Row:
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    return float(entry["timestamp"]) / 1000.0, int(entry["input_length"]), int(entry["output_length"])
