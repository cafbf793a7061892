"""Folders that are built once and then shared by every process of this user."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str], None]

MANIFEST = "nightjar-manifest.json"


def cache_root() -> Path:
    """The folder for everything Nightjar keeps between runs; scripts/venv.sh uses the same rule.

    `$NIGHTJAR_CACHE`, else `$XDG_CACHE_HOME/sglang-nightjar`, else `~/.cache/sglang-nightjar`.
    An empty variable counts as unset.
    """
    if own := os.environ.get("NIGHTJAR_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "sglang-nightjar"
    return Path.home() / ".cache" / "sglang-nightjar"


def is_complete(folder: Path) -> bool:
    """Whether `folder` was built to the end and still has every file at its recorded size (bytes)."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def build_once(folder: Path, build: Callable[[Path], None], progress: Progress) -> Path:
    """Return `folder`, after having it built if it is missing or damaged.

    Args:
        folder: where the result belongs; its name must change whenever the result would.
        build: fills the empty folder it is given. What it raises is passed on, and nothing is left behind.
        progress: is told, a line at a time, if this call has to wait for another process.

    A reader never sees a half-built folder: it is filled under another name beside it and renamed.
    Of several processes that call this together, one builds and the others wait for it.
    """
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.parent / ".lock", progress):
        if is_complete(folder):
            return folder
        # Holding the lock, we know that a partial folder is a killed process's.
        partial = folder.parent / f".partial-{folder.name}"
        for leftover in (partial, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir()
        try:
            build(partial)
            sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
            (partial / MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n")
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder


@contextmanager
def _exclusive(lock_file: Path, progress: Progress) -> Iterator[None]:
    # flock belongs to the open file, so a process that dies lets go, and threads exclude each other too.
    with open(lock_file, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that is building in {lock_file.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
