"""Finished runs kept in a file, so that a suite of hours can be stopped and taken up again."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from sglang_nightjar.errors import UserError

T = TypeVar("T")
_PACKAGE = Path(__file__).resolve().parents[1]
_CODE = ("policy", "simulate")  # what a result depends on


class Kept(Generic[T]):
    """Results of type `kind` in the JSONL file `path`, one line per run: `key` and `result`.

    A run's key covers its function, its arguments and the source of `policy/` and `simulate/`: results
    of other code are in the file and never found. A last line cut off by a stop is dropped.
    Raises `UserError` where the file cannot be read or written.
    """

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path, self._kind = path, kind
        self._known: dict[str, Any] = {}
        try:
            path.touch()
            text = path.read_text()
        except OSError as error:
            raise UserError(f"cannot use {path} to keep runs in: {error.strerror or error}") from None
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                self._known[record["key"]] = record["result"]
            except (ValueError, TypeError, KeyError):
                raise UserError(f"{path}, line {number}, is not a kept run; give another file") from None

    def find(self, function: Callable[..., T], task: tuple[Any, ...]) -> T | None:
        """The kept result of `function(*task)`."""
        found = self._known.get(key(function, task))
        return None if found is None else msgspec.convert(found, self._kind)

    def add(self, function: Callable[..., T], task: tuple[Any, ...], result: T) -> None:
        """Keeps a result, at once on disk."""
        # Not msgspec's JSON: it has no NaN, and a metric of no requests is one.
        record = {"key": key(function, task), "result": msgspec.to_builtins(result)}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def key(function: Callable[..., Any], task: tuple[Any, ...]) -> str:
    """A run's name: who computes it, of what, by which code."""
    return hashlib.sha256(f"{function.__qualname__} {task!r} {_code()}".encode()).hexdigest()[:24]


@cache
def _code() -> str:
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
