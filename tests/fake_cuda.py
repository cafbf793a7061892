"""A CUDA driver without a GPU: `cuda.bindings.driver`'s virtual memory calls, over the host's own.

Streams, copies and what they need are in `fake_streams.py`.
A handle is a file in memory, mapping is mmap at a fixed address, access is mprotect. So contents
travel with handles, memory lives until it is neither held nor mapped, and touching an address that
is not mapped, or that nothing may access, is a fault. Results and types are those of the bindings.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from cuda.bindings import driver
from fake_streams import DEFAULT_STREAM, FakeStreams, Refusal, answers

from sglang_nightjar.memory.cuda_tensors import unit_digests

PAGE = os.sysconf("SC_PAGE_SIZE")
GARBAGE = 0xA5  # what new memory is full of
PROT_NONE, READ_WRITE, MAP_FIXED = 0, mmap.PROT_READ | mmap.PROT_WRITE, 0x10
NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # not to be counted as memory in use

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FakeCuda(FakeStreams):
    """One device; also the `Tensors` over its memory, which are on the CPU, and the driver's types.

    Args:
        unit: the granularity.
        memory: bytes the device has, for everybody.

    Attributes:
        mappings: address to size and handle. accessible: addresses of mappings that may be used.
        held: handles not released: their sizes.
    """

    def __init__(self, unit: int = 2 * PAGE, memory: int = 1 << 30) -> None:
        super().__init__()
        self.unit = unit
        self.memory = memory
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.held: dict[int, int] = {}
        self._files: dict[int, tuple[int, int]] = {}  # handle to size and file, of all memory there is
        self._next = 1

    @property
    def used(self) -> int:
        """Bytes of memory that are held or mapped."""
        return sum(size for size, _ in self._files.values())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(driver, name)
        raise AttributeError(name)

    def close(self) -> None:
        """The end of the process."""
        for address, size in self.reservations.items():
            _libc.munmap(address, size)
        for _, file in self._files.values():
            os.close(file)

    @answers(1)
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self.require(prop.location.id == 0, f"device {prop.location.id} of 1")
        return self.unit

    @answers(1)
    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> driver.CUdeviceptr:
        self.require(size > 0 and size % PAGE == 0, f"a reservation of {size} bytes, pages of {PAGE}")
        self.require(alignment & (alignment - 1) == 0, f"alignment {alignment} is not a power of two")
        self.require(flags == 0, f"flags {flags}")
        whole = _map(None, size + alignment, PROT_NONE, NOTHING, -1)
        start = -(-whole // max(alignment, 1)) * max(alignment, 1)
        for address, nbytes in ((whole, start - whole), (start + size, whole + alignment - start)):
            if nbytes:
                _libc.munmap(address, nbytes)
        self.reservations[start] = size
        return driver.CUdeviceptr(start)

    @answers(0)
    def cuMemAddressFree(self, ptr: Any, size: int) -> None:
        self.require(self.reservations.get(int(ptr)) == size, f"free of {size} bytes at {ptr}: not as reserved")
        inside = [address for address in self.mappings if int(ptr) <= address < int(ptr) + size]
        self.require(not inside, f"free of addresses with {len(inside)} mappings")
        del self.reservations[int(ptr)]
        _libc.munmap(int(ptr), size)

    @answers(1)
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> driver.CUmemGenericAllocationHandle:
        self.require(size > 0 and size % self.unit == 0, f"a handle of {size} bytes, units of {self.unit}")
        self.require(prop.type == driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, f"type {prop.type}")
        self.require(_is_this_device(prop.location) and flags == 0, f"a handle on {prop.location}, flags {flags}")
        if self.used + size > self.memory:
            raise Refusal(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        handle, self._next = self._next, self._next + 1
        file = os.memfd_create("handle")
        os.write(file, bytes([GARBAGE]) * size)
        self._files[handle] = size, file
        self.held[handle] = size
        return driver.CUmemGenericAllocationHandle(handle)

    @answers(0)
    def cuMemMap(self, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
        address, number = int(ptr), int(handle)
        self.require(
            address % self.unit == size % self.unit == offset % self.unit == 0 < size,
            f"map of {size} bytes at {address}, offset {offset}: units of {self.unit}",
        )
        self.require(flags == 0, f"flags {flags}")
        self.require(
            any(start <= address and address + size <= start + n for start, n in self.reservations.items()),
            f"map of {size} bytes at {address}: not reserved",
        )
        self.require(not self._overlapping(address, size), f"map of {size} bytes at {address}: mapped already")
        self.require(number in self.held, f"map of handle {number}, which is not held")
        self.require(offset + size <= self.held[number], f"map of {offset + size} bytes of {self.held[number]}")
        _map(address, size, PROT_NONE, mmap.MAP_SHARED | MAP_FIXED, self._files[number][1], offset)
        self.mappings[address] = size, number

    @answers(0)
    def cuMemSetAccess(self, ptr: Any, size: int, desc: Sequence[Any], count: int) -> None:
        address = int(ptr)
        covered = self._overlapping(address, size)
        self.require(
            sum(self.mappings[at][0] for at in covered) == size and min(covered) == address,
            f"access to {size} bytes at {address}: not exactly whole mappings",
        )
        rights = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.require(
            count == len(desc) == 1 and desc[0].flags == rights and _is_this_device(desc[0].location),
            f"access of {count} devices: {desc}",
        )
        assert _libc.mprotect(address, size, READ_WRITE) == 0
        self.accessible |= set(covered)

    @answers(0)
    def cuMemUnmap(self, ptr: Any, size: int) -> None:
        address = int(ptr)
        self.require(self.mappings.get(address, (0, 0))[0] == size, f"unmap of {size} bytes at {address}: not one map")
        self.require(
            not self.in_use(address, size),
            f"unmap of {size} bytes at {address}, which a stream is using",
        )
        _, number = self.mappings.pop(address)
        self.accessible.discard(address)
        _map(address, size, PROT_NONE, NOTHING | MAP_FIXED, -1)
        self._free_if_unused(number)

    @answers(0)
    def cuMemRelease(self, handle: Any) -> None:
        self.require(int(handle) in self.held, f"release of handle {handle}, which is not held")
        del self.held[int(handle)]
        self._free_if_unused(int(handle))

    def view(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        memory = (ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def zero(self, address: int, nbytes: int) -> None:
        self._by_torch("zero", address, nbytes)
        ctypes.memset(address, 0, nbytes)

    def digest(self, address: int, nbytes: int, unit: int) -> torch.Tensor:
        self._by_torch("digest", address, nbytes)
        return unit_digests(self.view(address, (nbytes,), torch.uint8), unit)

    def current_stream(self) -> int:
        return DEFAULT_STREAM

    def release_cached(self) -> None:
        """torch keeps nothing here."""

    def accessible_range(self, address: int, nbytes: int) -> bool:
        covered = [at for at in self._overlapping(address, nbytes) if at in self.accessible]
        inside = [min(at + self.mappings[at][0], address + nbytes) - max(at, address) for at in covered]
        return sum(inside) == nbytes

    def _by_torch(self, name: str, address: int, nbytes: int) -> None:
        """Work that torch does at once, on a stream of its own, which waits for no other."""
        try:
            self.count(name)
            self.require(self.accessible_range(address, nbytes), f"{name} of {nbytes} bytes at {address}: no memory")
            self.require(not self.in_use(address, nbytes), f"{name} of {nbytes} bytes that another stream is using")
        except Refusal as refusal:
            raise RuntimeError("CUDA error: out of memory") from refusal

    def _overlapping(self, address: int, size: int) -> list[int]:
        return [at for at, (n, _) in self.mappings.items() if at < address + size and address < at + n]

    def _free_if_unused(self, handle: int) -> None:
        if handle not in self.held and all(number != handle for _, number in self.mappings.values()):
            os.close(self._files.pop(handle)[1])


def _is_this_device(location: Any) -> bool:
    return bool(location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE and location.id == 0)


def _map(address: int | None, size: int, protection: int, flags: int, file: int, offset: int = 0) -> int:
    found = _libc.mmap(address, size, protection, flags, file, offset)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(found)
