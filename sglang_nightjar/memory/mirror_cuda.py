"""The mirror of CUDA devices: pinned host memory, and one stream that copies it back beside everything else.

A copy engine does the copying, while the streams that serve go on. The thread that reloads waits for
events of the copy stream, with at most two chunks on their way. On a PCIe 5.0 link of 16 lanes (64 GB/s)
1 GB takes no less than 16 ms; one chunk of 16 MiB per scheduler iteration takes 0.26 ms of each.
"""

import ctypes
import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sglang_nightjar.errors import UserError
from sglang_nightjar.memory.cuda_driver import CudaDriver, DriverError
from sglang_nightjar.memory.cuda_tensors import Tensors, unit_digests
from sglang_nightjar.memory.fence_cuda import event_flags
from sglang_nightjar.memory.mirror import MirrorError

_ON_THE_WAY = 2  # chunks: one being copied, and the next, so that the copy engine need not wait for the thread


class PinnedMirror:
    """`Mirror` in pinned memory; checksums are those of `unit_digests`, computed on the device.

    Args:
        contents: uint8 [n] on the device, n a multiple of `unit`; the mirror holds what it holds now.
        unit: bytes that a checksum is taken of at a time.

    Raises:
        UserError: the host does not give so much pinned memory.
        DriverError, MirrorError: the weights could not be read, or read differently on the host.
    """

    def __init__(self, driver: CudaDriver, tensors: Tensors, contents: torch.Tensor, unit: int) -> None:
        self.copied = 0
        self._driver, self._tensors = driver, tensors
        self._address, self._size, self._unit = contents.data_ptr(), len(contents), unit
        try:
            self._host = int(driver.call("cuMemHostAlloc", self._size, 0))
        except DriverError as error:
            raise UserError(
                f"the host does not give {self._size} bytes of pinned memory for the draft's weights: {error}; "
                "free host memory, raise the limit on locked memory (ulimit -l), or set --nightjar-elastic off"
            ) from error
        self._stream = driver.call("cuStreamCreate", int(driver.types.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._events = [driver.call("cuEventCreate", event_flags(driver)) for _ in range(_ON_THE_WAY)]
        self._running = False
        self._fill()

    def restore(self, chunk_bytes: int, before_chunk: Callable[[], None]) -> str:
        waiting: deque[Any] = deque()
        try:
            for number, start in enumerate(range(0, self._size, chunk_bytes)):
                before_chunk()
                if len(waiting) == _ON_THE_WAY:
                    self._driver.call("cuEventSynchronize", waiting.popleft())
                nbytes = min(chunk_bytes, self._size - start)
                self._running = True
                target, source = self._address + start, self._host + start
                self.copied += nbytes
                self._driver.call("cuMemcpyHtoDAsync", target, source, nbytes, self._stream)
                event = self._events[number % _ON_THE_WAY]
                self._driver.call("cuEventRecord", event, self._stream)
                waiting.append(event)
            self._driver.call("cuEventSynchronize", waiting[-1])
        except DriverError as error:
            raise MirrorError(f"the draft's weights could not be copied to the device: {error}") from error
        self._running = False
        return self.digest()

    def settle(self) -> None:
        if not self._running:
            return
        try:
            self._driver.call("cuStreamSynchronize", self._stream)
        except DriverError as error:
            raise MirrorError(f"copies of the draft's weights may still run: {error}") from error
        self._running = False

    def digest(self) -> str:
        try:
            return _checksum(self._tensors.digest(self._address, self._size, self._unit))
        except RuntimeError as error:
            raise MirrorError(f"the draft's weights could not be read on the device: {error}") from error

    def intact(self) -> str | None:
        """Pinned memory does not go away."""
        return None

    def _fill(self) -> None:
        """Copies the device's bytes here, after what this thread has launched, and compares checksums."""
        ready, done = self._events
        self._driver.call("cuEventRecord", ready, self._tensors.current_stream())
        self._driver.call("cuStreamWaitEvent", self._stream, ready, 0)
        self._driver.call("cuMemcpyDtoHAsync", self._host, self._address, self._size, self._stream)
        self._driver.call("cuEventRecord", done, self._stream)
        self._driver.call("cuEventSynchronize", done)
        pinned = torch.frombuffer((ctypes.c_char * self._size).from_address(self._host), dtype=torch.uint8)
        here, there = _checksum(unit_digests(pinned, self._unit)), self.digest()
        if here != there:
            raise MirrorError(f"the draft's weights are {there[:12]} on the device and {here[:12]} in their mirror")


def _checksum(digests: torch.Tensor) -> str:
    return hashlib.blake2b(digests.numpy().tobytes()).hexdigest()
