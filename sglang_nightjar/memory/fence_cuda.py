"""What taking memory away must wait for on a GPU: whatever was launched when a turn was made."""

from collections.abc import Callable, Sequence
from typing import Any

from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.cuda_driver import CudaDriver, DriverError


class StreamFence:
    """Events on the streams that use arenas: recorded by the scheduler's thread, waited for by another.

    What is launched later must not use memory that is then taken away. It waits for these events, and
    for nothing else on the device.

    Args:
        streams: the driver's names of the streams whose work may use an arena; asked at every `mark`.
    """

    def __init__(self, driver: CudaDriver, streams: Callable[[], Sequence[Any]]) -> None:
        self._driver = driver
        self._streams = streams
        self._events: dict[int, Any] = {}  # by stream
        self._unmarked: DriverError | None = None

    def mark(self) -> None:
        """What was launched so far is what `wait` waits for. Where that fails, `wait` will refuse; nothing is raised.

        The scheduler's loop calls this and has nowhere to put a failure: it belongs to the move that waits.
        """
        self._unmarked = None
        try:
            for stream in self._streams():
                event = self._events.get(int(stream))
                if event is None:
                    event = self._events[int(stream)] = self._driver.call("cuEventCreate", event_flags(self._driver))
                self._driver.call("cuEventRecord", event, stream)
        except DriverError as error:
            self._unmarked = error

    def wait(self) -> None:
        """Returns when what was marked has run; `CommitError` where that cannot be known."""
        try:
            if self._unmarked is not None:
                raise self._unmarked
            for event in list(self._events.values()):
                self._driver.call("cuEventSynchronize", event)
        except DriverError as error:
            raise CommitError(f"memory not taken away, since something may still use it: {error}") from error


def event_flags(driver: CudaDriver) -> int:
    """For events that only order: no times are taken, and who waits sleeps."""
    flags = driver.types.CUevent_flags
    return int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING)
