"""The journal: every directive and every finished step, one JSON object per line, rotated by size.

`simulate --replay FILE` runs other policies on it. Rank r of several writes `FILE.rank<r>`
(rank 0 writes FILE itself), so that agreement between ranks can be checked afterwards.
"""

from pathlib import Path
from typing import Any

import msgspec

_LONGEST = 64 << 20  # bytes of one file
_KEPT = 3  # rotated files kept: FILE.1 is the latest


class Journal:
    """Appends records to a file. Raises `OSError` at construction where it cannot be written."""

    def __init__(self, path: Path, rank: int = 0, longest: int = _LONGEST) -> None:
        self._path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
        self._longest = longest
        self._encoder = msgspec.json.Encoder()
        self._file = self._path.open("ab")
        self._size = self._path.stat().st_size

    def write(self, kind: str, record: Any) -> None:
        """One line: `{"record": kind, ...}` and the record's fields."""
        line = self._encoder.encode({"record": kind, **msgspec.to_builtins(record)}) + b"\n"
        if self._size + len(line) > self._longest and self._size > 0:
            self._rotate()
        self._file.write(line)
        self._file.flush()
        self._size += len(line)

    def _rotate(self) -> None:
        self._file.close()
        for number in range(_KEPT - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            if older.exists():
                older.rename(self._path.with_name(f"{self._path.name}.{number + 1}"))
        self._path.rename(self._path.with_name(f"{self._path.name}.1"))
        self._file = self._path.open("wb")
        self._size = 0

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every record of one file, oldest first; `ValueError` names a line that is not JSON."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            records.append(msgspec.json.decode(line))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
    return records
