"""Streams, events, pinned memory and contexts of a CUDA driver without a GPU.

What a stream is given is done as late as CUDA allows: when somebody waits for it. With `hold` set, not even
then, but when the test says so (`complete`); who waits sleeps until that. So whoever takes an asynchronous
copy for done finds the bytes of before.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from cuda.bindings import driver

WITHOUT_CONTEXT = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent")
DEFAULT_STREAM = 0
PATIENCE_S = 30.0  # until a wait that nobody ends is an error


class Refusal(Exception):
    """The driver's answer is this result."""

    def __init__(self, result: driver.CUresult) -> None:
        self.result = result


def answers(values: int) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """A method becomes a driver call that answers with a result and so many values."""

    def decorate(method: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @wraps(method)
        def call(self: "FakeStreams", *arguments: Any) -> tuple[Any, ...]:
            try:
                self.count(method.__name__)
                value = method(self, *arguments)
            except Refusal as refusal:
                return (refusal.result, *values * [None])
            return (driver.CUresult.CUDA_SUCCESS, *values * [value])

        return call

    return decorate


@dataclass
class Work:
    """What a stream is to do, and the device addresses that it uses until it is done."""

    run: Callable[[], object]
    uses: range = range(0)
    after: tuple[int, int] | None = None  # a stream, and how much of its work must be done before


class FakeStreams:
    """See the module's docstring.

    Attributes:
        calls: names of all calls so far.
        refuse: calls, by their number in `calls`, that fail with `result`.
        violations: rules of CUDA that were broken, in words; to be empty.
        hold: whether work waits for `complete`.
        pinned: addresses of pinned memory, and bytes there.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuse: set[int] = set()
        self.result = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self.violations: list[str] = []
        self.hold = False
        self.pinned: dict[int, mmap.mmap] = {}
        self._streams: dict[int, list[Work]] = {DEFAULT_STREAM: []}
        self._done: dict[int, int] = {DEFAULT_STREAM: 0}  # how much of its work each stream has done
        self._events: dict[int, tuple[int, int]] = {}  # a stream, and how much of its work came before
        self._next_name = 1
        self._thread = threading.local()
        self._changed = threading.Condition()

    def refuse_next(self, after: int) -> None:
        """The call after so many others fails."""
        self.refuse = {len(self.calls) + after}

    def refused(self) -> bool:
        """Whether a call that was to fail was made."""
        return any(number < len(self.calls) for number in self.refuse)

    def count(self, name: str) -> None:
        """A call is made; `Refusal` where it is to fail."""
        self.calls.append(name)
        if len(self.calls) - 1 in self.refuse:
            raise Refusal(self.result)
        if name.startswith("cu") and name not in WITHOUT_CONTEXT:
            self.require(hasattr(self._thread, "context"), f"{name} in a thread without a context")

    def require(self, kept: bool, violation: str) -> None:
        if not kept:
            self.violations.append(violation)
            raise Refusal(driver.CUresult.CUDA_ERROR_INVALID_VALUE)

    # What a test does.

    def use(self, address: int, size: int, stream: int = DEFAULT_STREAM) -> None:
        """As a kernel does that was launched and reads or writes there."""
        self._give(stream, Work(lambda: None, range(address, address + size)))

    def complete(self, count: int | None = None) -> None:
        """Does so many pieces of work, or all there is, one stream after the other."""
        with self._changed:
            for stream, works in self._streams.items():
                while self._done[stream] < len(works) and count != 0:
                    self._advance(stream, self._done[stream] + 1)
                    count = None if count is None else count - 1
            self._changed.notify_all()

    def in_use(self, address: int, size: int) -> bool:
        """Whether work that is not done uses any of these addresses."""
        return any(
            work.uses.start < address + size and address < work.uses.stop
            for stream, works in self._streams.items()
            for work in works[self._done[stream] :]
        )

    # The driver's calls.

    @answers(0)
    def cuInit(self, flags: int) -> None:
        self.require(flags == 0, f"flags {flags}")

    @answers(1)
    def cuDeviceGet(self, ordinal: int) -> driver.CUdevice:
        self.require(ordinal == 0, f"device {ordinal} of 1")
        return driver.CUdevice(ordinal)

    @answers(1)
    def cuDevicePrimaryCtxRetain(self, device: Any) -> driver.CUcontext:
        return driver.CUcontext(0xC0)

    @answers(0)
    def cuCtxSetCurrent(self, context: Any) -> None:
        self.require(int(context) == 0xC0, f"context {context}")
        self._thread.context = context

    @answers(1)
    def cuStreamCreate(self, flags: int) -> driver.CUstream:
        self.require(flags == 1, "a stream that waits for the default stream")
        name = self._name()
        self._streams[name], self._done[name] = [], 0
        return driver.CUstream(name)

    @answers(0)
    def cuStreamSynchronize(self, stream: Any) -> None:
        self.require(int(stream) in self._streams, f"stream {stream}")
        self._wait(int(stream), len(self._streams[int(stream)]))

    @answers(0)
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        self.require(int(event) in self._events and flags == 0, f"event {event}, flags {flags}")
        self._give(int(stream), Work(lambda: None, after=self._events[int(event)]))

    @answers(1)
    def cuEventCreate(self, flags: int) -> driver.CUevent:
        self.require(flags == 3, f"an event that takes times or makes its waiter spin: flags {flags}")
        name = self._name()
        self._events[name] = DEFAULT_STREAM, 0
        return driver.CUevent(name)

    @answers(0)
    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self.require(int(event) in self._events and int(stream) in self._streams, f"event {event}, stream {stream}")
        self._events[int(event)] = int(stream), len(self._streams[int(stream)])

    @answers(0)
    def cuEventSynchronize(self, event: Any) -> None:
        self.require(int(event) in self._events, f"event {event}")
        self._wait(*self._events[int(event)])

    @answers(1)
    def cuMemHostAlloc(self, size: int, flags: int) -> int:
        self.require(size > 0 and flags == 0, f"{size} bytes of pinned memory, flags {flags}")
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.pinned[address] = memory
        return address

    @answers(0)
    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._copy(target, source, nbytes, stream, device=target, host=source)

    @answers(0)
    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._copy(target, source, nbytes, stream, device=source, host=target)

    def _copy(self, target: int, source: int, nbytes: int, stream: Any, *, device: int, host: int) -> None:
        self.require(self.accessible_range(device, nbytes), f"a copy of {nbytes} bytes at {device}: no memory")
        self.require(
            any(at <= host and host + nbytes <= at + len(memory) for at, memory in self.pinned.items()),
            f"a copy of {nbytes} bytes at {host}: pageable memory, so it would not be asynchronous",
        )
        self._give(int(stream), Work(lambda: ctypes.memmove(target, source, nbytes), range(device, device + nbytes)))

    def accessible_range(self, address: int, nbytes: int) -> bool:
        """Whether the device may use all of it."""
        raise NotImplementedError

    def _name(self) -> int:
        self._next_name += 1
        return self._next_name

    def _give(self, stream: int, work: Work) -> None:
        self.require(stream in self._streams, f"stream {stream}")
        with self._changed:
            self._streams[stream].append(work)

    def _advance(self, stream: int, upto: int) -> None:
        while self._done[stream] < upto:
            work = self._streams[stream][self._done[stream]]
            if work.after is not None:
                self._advance(*work.after)
            work.run()
            self._done[stream] += 1

    def _wait(self, stream: int, upto: int) -> None:
        with self._changed:
            if self.hold:
                assert self._changed.wait_for(lambda: self._done[stream] >= upto, PATIENCE_S), "nobody ends this wait"
            else:
                self._advance(stream, upto)
                self._changed.notify_all()
