"""Work beside the decode loop, at the loop's pace: a thread, one permission per scheduler iteration."""

import threading
import time
from collections.abc import Callable

from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.draft_store import MirrorError
from sglang_nightjar.memory.ledger import OverBudget


class Cancelled(Exception):
    """The work is not wanted any more."""


class Pace:
    """One permission at a time: the scheduler's loop gives one per iteration, the copying thread takes it.

    Permissions do not add up, so between two decode steps at most one chunk is copied.
    """

    def __init__(self) -> None:
        self._given = threading.Event()
        self._cancelled = False

    def give(self) -> None:
        self._given.set()

    def cancel(self) -> None:
        self._cancelled = True
        self._given.set()

    def take(self) -> None:
        """Waits for a permission; raises `Cancelled` once the work is not wanted any more."""
        self._given.wait()
        self._given.clear()
        if self._cancelled:
            raise Cancelled


class Background:
    """Runs `work` in a thread from the start.

    Attributes:
        pace: what `work` is called with.
        seconds: how long it took, once it has ended.
    """

    def __init__(self, name: str, work: Callable[[Pace], None]) -> None:
        self.pace = Pace()
        self.seconds = 0.0
        self._ended = False
        self._failure: str | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            self._work(self.pace)
        except Cancelled:
            self._failure = "cancelled"
        except (CommitError, MirrorError, OverBudget, OSError) as error:
            self._failure = str(error)
        self.seconds = time.perf_counter() - begin
        self._ended = True

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """Why it failed, once it has ended; None where it ended well."""
        assert not self.running, "it has not ended"
        return self._failure if self._ended else "the thread died"
