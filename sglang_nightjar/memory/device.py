"""The device whose memory moves between draft and KV cache, as the parts that move it see it."""

import ctypes
from pathlib import Path
from typing import Protocol

import torch

from sglang_nightjar.memory.arena import Arena
from sglang_nightjar.memory.arena_posix import PAGE, posix_arena
from sglang_nightjar.memory.mirror import Mirror
from sglang_nightjar.memory.mirror_posix import FileMirror


class DeviceMemory(Protocol):
    """One rank's device. What its arenas give up, its arenas can take.

    Attributes:
        granularity: bytes, of every commit.
    """

    granularity: int

    def arena(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes` bytes; `CommitError` where there is no such address space."""
        ...

    def mirror(self, contents: torch.Tensor) -> Mirror:
        """Keeps what these bytes of an arena (uint8 [n], whole units) hold now on the host."""
        ...

    def mark(self) -> None:
        """By the scheduler's thread, between steps: memory taken away from now on waits for what is launched."""
        ...

    def wait(self) -> None:
        """Returns when what was launched before the last `mark` has run; `CommitError` where that cannot be known.

        Arenas do so by themselves before they take memory away.
        """
        ...

    def release_unused(self) -> None:
        """Memory this process has freed goes back to the device at once; while loading, or after modules freed some."""
        ...


class PosixDevice:
    """The CPU platform's: host memory.

    Args:
        folder: on disk, where mirrors are kept; None: where the system keeps temporary files.
    """

    granularity = PAGE

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def arena(self, nbytes: int) -> Arena:
        return posix_arena(nbytes)

    def mirror(self, contents: torch.Tensor) -> Mirror:
        return FileMirror(contents, self._folder)

    def mark(self) -> None:
        """Whatever was called has returned."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def release_unused(self) -> None:
        """Where the C library can; else it stays this process's, which is counted as free all the same."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
