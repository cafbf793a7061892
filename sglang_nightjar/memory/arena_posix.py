"""The arena of the CPU platform: host address space by mmap, memory by mprotect and madvise.

Memory is under a committed range from the moment `commit` returns, not from the first write,
so a shortage is an error there and not a kill later. Touching a range that is not committed
faults, as unmapped device memory does.
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from sglang_nightjar.memory.arena import CommitError, CommitMap

PAGE = os.sysconf("SC_PAGE_SIZE")
_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_NORESERVE = 0x4000  # Linux; Python's mmap does not name it in every version
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # Linux 5.14
# Populating holds a lock that the other threads' mallocs need: 1.4 s for 1 GiB at once, 6 ms in steps of this.
_POPULATE_STEP = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class PosixArena:
    """`Arena` over private anonymous host memory.

    Args:
        size: bytes of address space, a multiple of `granularity`.
        granularity: unit of commits, a multiple of the system's page size, which it is by default.
    Raises:
        CommitError: no such address space.
    """

    def __init__(self, size: int, granularity: int = PAGE) -> None:
        assert granularity > 0 and granularity % PAGE == 0, f"granularity {granularity}, pages of {PAGE} bytes"
        self._map = CommitMap(size, granularity)
        self.granularity = granularity
        self.size = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _libc.mmap(None, size, _PROT_NONE, flags, -1, 0)
        if address == _MAP_FAILED:
            raise CommitError(
                f"no {size} bytes of address space: {os.strerror(ctypes.get_errno())}; "
                "raise the limit on virtual memory (ulimit -v)"
            )
        self.address: int = address
        # Every tensor holds this object. The mapping goes with its last holder, at the end of the process by itself.
        self._buffer: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * size).from_address(address)
        weakref.finalize(self._buffer, _libc.munmap, address, size).atexit = False

    @property
    def committed(self) -> int:
        return self._map.committed

    def commit(self, start: int, stop: int) -> None:
        self._require(start, stop, committed=False)
        try:
            self._protect(start, stop, _PROT_READ_WRITE)
            self._populate(start, stop)
        except OSError as error:
            self._advise(start, stop, mmap.MADV_DONTNEED)
            self._protect(start, stop, _PROT_NONE)
            raise CommitError(f"no memory for {stop - start} bytes at offset {start}: {error.strerror}") from error
        self._map.flip(start, stop)

    def decommit(self, start: int, stop: int) -> None:
        self._require(start, stop, committed=True)
        try:
            self._protect(start, stop, _PROT_NONE)  # first, as it can be undone
            self._advise(start, stop, mmap.MADV_DONTNEED)
        except OSError as error:
            self._protect(start, stop, _PROT_READ_WRITE)
            raise CommitError(f"{stop - start} bytes at offset {start} not given back: {error.strerror}") from error
        self._map.flip(start, stop)

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._buffer is not None, "the arena is closed"
        count = prod(shape)
        stop = start + count * dtype.itemsize
        assert 0 <= start < stop <= self.size, f"a tensor over [{start}, {stop}) of an arena of {self.size} bytes"
        assert start % dtype.itemsize == 0, f"a tensor at offset {start}, elements of {dtype.itemsize} bytes"
        return torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=start).view(tuple(shape))

    def close(self) -> None:
        self._buffer = None

    def _require(self, start: int, stop: int, committed: bool) -> None:
        assert self._buffer is not None, "the arena is closed"
        self._map.require(start, stop, committed)

    def _populate(self, start: int, stop: int) -> None:
        try:
            for step in range(start, stop, _POPULATE_STEP):
                self._advise(step, min(step + _POPULATE_STEP, stop), _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says: a kernel without it
                raise
            ctypes.memset(self.address + start, 0, stop - start)

    def _protect(self, start: int, stop: int, protection: int) -> None:
        _check(_libc.mprotect(self.address + start, stop - start, protection))

    def _advise(self, start: int, stop: int, advice: int) -> None:
        _check(_libc.madvise(self.address + start, stop - start, advice))


def resident(address: int, size: int) -> int:
    """Bytes of [address, address + size) that have physical memory now, whole pages; `address` begins a page.

    Raises:
        OSError: part of the range is no mapping of this process.
    """
    assert size > 0 and address % PAGE == 0, f"{size} bytes at address {address}, pages of {PAGE} bytes"
    pages = ctypes.create_string_buffer(-(-size // PAGE))
    _check(_libc.mincore(address, size, pages))
    return int((np.frombuffer(pages.raw, np.uint8) & 1).sum()) * PAGE


def _check(result: Any) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def posix_arena(nbytes: int) -> PosixArena:
    """An arena of at least `nbytes` bytes."""
    return PosixArena(-(-nbytes // PAGE) * PAGE)
