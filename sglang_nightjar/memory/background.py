"""Work beside the decode loop, at the loop's pace: a thread, one permission per scheduler iteration."""

import threading
import time
from collections.abc import Callable

from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.ledger import OverBudget
from sglang_nightjar.memory.mirror import MirrorError


class Cancelled(Exception):
    """The work is not wanted any more."""


class Pace:
    """One permission at a time: the scheduler's loop gives one per iteration, the copying thread takes it.

    Permissions do not add up, and none is given while what the last one permitted still runs. So between
    two iterations at most one chunk is copied, also where a chunk takes longer than an iteration.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._given = self._busy = self._cancelled = False

    def give(self, look: Callable[[], None]) -> None:
        """A permission, unless one is in use. `look`: called first, while no permission can be taken."""
        with self._changed:
            look()
            self._given = not self._busy
            self._changed.notify()

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify()

    def take(self) -> None:
        """What was permitted before is done; waits for the next permission, or raises `Cancelled` once the work is not
        wanted any more."""
        with self._changed:
            self._busy = False
            self._changed.wait_for(lambda: self._given or self._cancelled)
            self._given, self._busy = False, True
        if self._cancelled:
            raise Cancelled


class Background:
    """Runs `work` in a thread from the start.

    Attributes:
        pace: what `work` is called with.
        seconds: how long it took on `clock`, once it has ended.
    """

    def __init__(self, name: str, work: Callable[[Pace], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.pace = Pace()
        self.seconds = 0.0
        self._clock = clock
        self._ended = False
        self._failure: str | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begin = self._clock()
        try:
            self._work(self.pace)
        except Cancelled:
            self._failure = "cancelled"
        except (CommitError, MirrorError, OverBudget, OSError) as error:
            self._failure = str(error)
        self.seconds = self._clock() - begin
        self._ended = True

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """Why it failed, once it has ended; None where it ended well."""
        assert not self.running, "it has not ended"
        return self._failure if self._ended else "the thread died"
