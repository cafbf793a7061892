"""The arena of CUDA devices: address space by cuMemAddressReserve, memory by cuMemCreate and cuMemMap.

Memory comes in handles of one unit (2 MiB on GPUs of today). What an arena decommits goes to a
`HandlePool`, from which the other arenas of the device commit: memory the draft gives up comes under
the tails of the KV buffers without a moment in which another process could take it.

Upstream has `sglang.srt.utils.cuda_vmm_utils.VmmReservation`, which only grows: it unmaps nothing before
its end, and releases then. Its smaller helpers would fit; what they do is written out here, so that a
machine without SGLang can check arenas too (`scripts/gpu_check.sh`).
"""

import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from sglang_nightjar.memory.arena import CommitError, CommitMap
from sglang_nightjar.memory.cuda_driver import CudaDriver, DriverError
from sglang_nightjar.memory.cuda_tensors import Tensors


class HandlePool:
    """Physical memory of one device that this process holds and no arena has mapped: one for all arenas of a device.

    Taking and giving is safe from any thread.

    Args:
        tensors: of the driver's device.

    Attributes:
        granularity: bytes of a handle, the device's recommended unit.
        access: what `cuMemSetAccess` is given: this device reads and writes.

    Raises:
        DriverError: the device has no virtual memory management.
    """

    def __init__(self, driver: CudaDriver, tensors: Tensors) -> None:
        self.call = driver.call
        self.tensors = tensors
        types = driver.types
        here = types.CUmemLocation()
        here.type, here.id = types.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, driver.ordinal
        self._prop = types.CUmemAllocationProp()
        self._prop.type = types.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location = here
        # Not exportable: no other process is to map KV slots that come and go.
        self._prop.requestedHandleTypes = types.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        rights = types.CUmemAccessDesc()
        rights.location = here
        rights.flags = types.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.access = [rights]
        unit = types.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self.call("cuMemGetAllocationGranularity", self._prop, unit))
        self._spare: list[Any] = []
        self._lock = threading.Lock()

    @property
    def spare(self) -> int:
        """Bytes held and mapped nowhere."""
        return len(self._spare) * self.granularity

    def take(self, count: int) -> tuple[list[Any], list[Any]]:
        """Handles that were spare, as many as there are, and new ones: `count` together.

        Raises:
            DriverError: the device has no more; what was spare is so again, what was new is released.
        """
        with self._lock:
            kept = max(len(self._spare) - count, 0)
            reused, self._spare = self._spare[kept:], self._spare[:kept]
        created: list[Any] = []
        try:
            for _ in range(count - len(reused)):
                created.append(self.call("cuMemCreate", self.granularity, self._prop, 0))
        except DriverError:
            self.put_back(reused, created)
            raise
        return reused, created

    def put_back(self, reused: list[Any], created: list[Any]) -> None:
        """Undoes a `take`; new handles that cannot be released stay as spare ones."""
        self.give(reused)
        self.give(self._release(created)[0])

    def give(self, handles: list[Any]) -> None:
        """These are mapped nowhere and may be taken by others."""
        with self._lock:
            self._spare += handles

    def trim(self) -> None:
        """Gives what is spare back to the device; `CommitError` where it refuses some, which stays spare."""
        with self._lock:
            handles, self._spare = self._spare, []
        left, error = self._release(handles)
        self.give(left)
        if error is not None:
            raise CommitError(f"{len(left) * self.granularity} bytes not given back: {error}") from error

    def _release(self, handles: list[Any]) -> tuple[list[Any], DriverError | None]:
        """The handles that could not be released, and the last reason."""
        left, reason = [], None
        for handle in handles:
            try:
                self.call("cuMemRelease", handle)
            except DriverError as error:
                left.append(handle)
                reason = error
        return left, reason


class CudaArena:
    """`Arena` over the memory of a CUDA device.

    Its address never changes, so captured CUDA graphs stay valid over commits and decommits; one must
    not be replayed with slots that have no memory. Since graphs hold addresses without holding a
    tensor, only `close` ends the reservation, never a garbage collection: no tensor over it may be
    used, and no graph replayed, after that.

    Args:
        size: bytes of address space, a multiple of the pool's granularity.
        pool: of the device; where memory comes from and goes to.
        fence: called before memory is taken away. The driver unmaps at once, whatever streams still
            do there, so this returns only when none uses any range that may be decommitted: it
            synchronises with the event recorded after the last such use. Commits need none: the
            driver maps, and zeros are there, before `commit` returns.
    Raises:
        CommitError: no such address space.
    """

    def __init__(self, size: int, pool: HandlePool, fence: Callable[[], None]) -> None:
        self._map = CommitMap(size, pool.granularity)
        self.granularity = pool.granularity
        self.size = size
        self._pool = pool
        self._fence = fence
        try:
            self.address = int(pool.call("cuMemAddressReserve", size, self.granularity, 0, 0))
        except DriverError as error:
            raise CommitError(
                f"no {size} bytes of device address space: {error}; lower --nightjar-device-memory"
            ) from error
        self._handles: dict[int, Any] = {}  # by the offset of the unit each is mapped at
        self._closed = False

    @property
    def committed(self) -> int:
        return self._map.committed

    def commit(self, start: int, stop: int) -> None:
        self._require(start, stop, committed=False)
        units = range(start, stop, self.granularity)
        refused = f"no memory for {stop - start} bytes at offset {start}: "
        try:
            reused, created = self._pool.take(len(units))
        except DriverError as error:
            raise CommitError(f"{refused}{error}") from error
        handles = dict(zip(units, [*reused, *created], strict=True))
        mapped: list[int] = []
        try:
            self._put_under(handles, mapped)
            self._pool.tensors.zero(self.address + start, stop - start)
        except RuntimeError as error:
            self._unmap(mapped, [])
            self._pool.put_back(reused, created)
            raise CommitError(f"{refused}{error}") from error
        self._handles |= handles
        self._map.flip(start, stop)

    def decommit(self, start: int, stop: int) -> None:
        """As in `Arena`; the memory is spare in the pool then, which `HandlePool.trim` gives back to the device."""
        self._require(start, stop, committed=True)
        self._fence()
        self._take_away(range(start, stop, self.granularity))

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert not self._closed, "the arena is closed"
        stop = start + prod(shape) * dtype.itemsize
        assert 0 <= start < stop <= self.size, f"a tensor over [{start}, {stop}) of an arena of {self.size} bytes"
        assert start % dtype.itemsize == 0, f"a tensor at offset {start}, elements of {dtype.itemsize} bytes"
        tensor = self._pool.tensors.view(self.address + start, shape, dtype)
        assert tensor.data_ptr() == self.address + start, (
            f"a tensor at address {tensor.data_ptr()}, not {self.address + start}: captured graphs would be wrong"
        )
        return tensor

    def close(self) -> None:
        """Ends the reservation; the memory under it goes to the pool.

        Raises:
            CommitError: the device refused; what is left can be closed again.
        """
        if self._closed:
            return
        self._fence()
        for unit in sorted(self._handles):
            self._take_away(range(unit, unit + self.granularity, self.granularity))
        try:
            self._pool.call("cuMemAddressFree", self.address, self.size)
        except DriverError as error:
            raise CommitError(f"{self.size} bytes of address space not given back: {error}") from error
        self._closed = True

    def _require(self, start: int, stop: int, committed: bool) -> None:
        assert not self._closed, "the arena is closed"
        self._map.require(start, stop, committed)

    def _take_away(self, units: range) -> None:
        unmapped: list[int] = []
        try:
            self._unmap(units, unmapped)
        except DriverError as error:
            # What was there is still in the handles.
            self._put_under({unit: self._handles[unit] for unit in unmapped}, [])
            nbytes = units.stop - units.start
            raise CommitError(f"{nbytes} bytes at offset {units.start} not given back: {error}") from error
        self._pool.give([self._handles.pop(unit) for unit in units])
        self._map.flip(units.start, units.stop)

    def _put_under(self, handles: dict[int, Any], mapped: list[int]) -> None:
        """Maps adjacent units, each added to `mapped` when it is, and lets the device use them."""
        for unit, handle in handles.items():
            self._pool.call("cuMemMap", self.address + unit, self.granularity, 0, handle, 0)
            mapped.append(unit)
        if handles:
            nbytes = len(handles) * self.granularity
            self._pool.call("cuMemSetAccess", self.address + min(handles), nbytes, self._pool.access, 1)

    def _unmap(self, units: Sequence[int], unmapped: list[int]) -> None:
        """Each unit by itself, as it was mapped, and added to `unmapped` when it is."""
        for unit in units:
            self._pool.call("cuMemUnmap", self.address + unit, self.granularity)
            unmapped.append(unit)


def cuda_arena(nbytes: int, pool: HandlePool, fence: Callable[[], None]) -> CudaArena:
    """An arena of at least `nbytes` bytes."""
    return CudaArena(-(-nbytes // pool.granularity) * pool.granularity, pool, fence)
