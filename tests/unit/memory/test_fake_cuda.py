"""The fake driver itself: what tests over it show depends on it being as strict as CUDA."""

import ctypes
import signal
import threading
from contextlib import closing
from typing import Any

import pytest
from cuda_world import pool_on, state
from fake_cuda import GARBAGE, FakeCuda
from touching import signal_of_touching

from sglang_nightjar.memory.cuda_driver import CudaDriver, DriverError


def test_the_fake_driver_knows_the_rules() -> None:
    """Each is broken once: refused, noted, and without effect."""
    cuda = FakeCuda()
    unit = cuda.unit
    with closing(cuda):
        pool = pool_on(cuda)
        prop, access = pool._prop, pool.access
        base = int(pool.call("cuMemAddressReserve", 4 * unit, unit, 0, 0))
        handle, released = (pool.call("cuMemCreate", unit, prop, 0) for _ in range(2))
        pool.call("cuMemRelease", released)
        pool.call("cuMemMap", base, unit, 0, handle, 0)
        assert signal_of_touching(base) == signal.SIGSEGV  # no access yet
        pool.call("cuMemSetAccess", base, unit, access, 1)
        assert ctypes.string_at(base, unit) == bytes([GARBAGE]) * unit
        cuda.use(base + unit - 1, 1)
        before = state(cuda, pool)
        broken: list[tuple[Any, ...]] = [
            ("cuMemCreate", unit // 2, prop, 0),
            ("cuMemMap", base, unit, 0, handle, 0),
            ("cuMemMap", base + unit // 2, unit, 0, handle, 0),
            ("cuMemMap", base + 4 * unit, unit, 0, handle, 0),
            ("cuMemMap", base + unit, 2 * unit, 0, handle, 0),
            ("cuMemMap", base + unit, unit, 0, released, 0),
            ("cuMemSetAccess", base, 2 * unit, access, 1),
            ("cuMemSetAccess", base, unit, [], 0),
            ("cuMemUnmap", base + unit, unit),
            ("cuMemUnmap", base, 2 * unit),
            ("cuMemUnmap", base, unit),
            ("cuMemRelease", released),
            ("cuMemAddressFree", base, unit),
            ("cuMemAddressFree", base, 4 * unit),
        ]
        for number, (name, *arguments) in enumerate(broken, 1):
            with pytest.raises(DriverError, match=f"{name}: CUDA_ERROR_INVALID_VALUE"):
                pool.call(name, *arguments)
            assert len(cuda.violations) == number and state(cuda, pool) == before
        cuda.complete()
        pool.call("cuMemRelease", handle)
        assert cuda.used == unit and ctypes.string_at(base, 1) == bytes([GARBAGE])  # its mapping keeps it
        pool.call("cuMemUnmap", base, unit)
        assert cuda.used == 0 and signal_of_touching(base) == signal.SIGSEGV


def test_copies_are_done_when_somebody_waits_and_not_before(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    unit = pool.granularity
    base = int(pool.call("cuMemAddressReserve", 2 * unit, unit, 0, 0))
    for at in (base, base + unit):
        pool.call("cuMemMap", at, unit, 0, pool.call("cuMemCreate", unit, pool._prop, 0), 0)
    pool.call("cuMemSetAccess", base, 2 * unit, pool.access, 1)
    host = pool.call("cuMemHostAlloc", unit, 0)
    ctypes.memset(host, 7, unit)
    first, second = (pool.call("cuStreamCreate", 1) for _ in range(2))
    copied, later = (pool.call("cuEventCreate", 3) for _ in range(2))
    pool.call("cuMemcpyHtoDAsync", base, host, 64, first)
    pool.call("cuEventRecord", copied, first)
    pool.call("cuMemcpyHtoDAsync", base + 64, host, 64, first)
    pool.call("cuStreamWaitEvent", second, copied, 0)
    pool.call("cuMemcpyDtoHAsync", host, base, 64, second)
    pool.call("cuEventRecord", later, second)
    old = bytes([GARBAGE]) * 64
    assert ctypes.string_at(base, 128) == 2 * old and cuda.in_use(base, 1) and cuda.in_use(base + 127, 1)
    pool.call("cuEventSynchronize", later)
    assert ctypes.string_at(base, 128) == bytes([7]) * 64 + old, "what came before the event, and no more"
    assert not cuda.in_use(base, 64) and cuda.in_use(base + 64, 64)
    cuda.hold = True
    waiting = threading.Thread(target=pool.call, args=("cuStreamSynchronize", first))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and ctypes.string_at(base + 64, 64) == old
    cuda.complete(1)
    waiting.join(10)
    assert not waiting.is_alive() and ctypes.string_at(base, 128) == bytes([7]) * 128


def test_the_rules_of_streams() -> None:
    """Each is broken once, and without effect."""
    cuda = FakeCuda()
    with closing(cuda):
        driver = CudaDriver(0, cuda)
        stream, event = driver.call("cuStreamCreate", 1), driver.call("cuEventCreate", 3)
        host = driver.call("cuMemHostAlloc", 4096, 0)
        broken: list[tuple[Any, ...]] = [
            ("cuStreamCreate", 0),
            ("cuEventCreate", 0),
            ("cuEventRecord", event, int(stream) + 9),
            ("cuEventRecord", int(event) + 9, stream),
            ("cuEventSynchronize", int(event) + 9),
            ("cuStreamWaitEvent", stream, int(event) + 9, 0),
            ("cuMemcpyHtoDAsync", host, host, 64, stream),  # not the device's memory
        ]
        for number, (name, *arguments) in enumerate(broken, 1):
            with pytest.raises(DriverError, match=f"{name}: CUDA_ERROR_INVALID_VALUE"):
                driver.call(name, *arguments)
            assert len(cuda.violations) == number
        without: list[str] = []

        def other_thread() -> None:
            cuda.cuEventSynchronize(event)
            without.append(cuda.violations[-1])
            driver.call("cuEventSynchronize", event)  # which makes the context current first

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(10)
        assert without == ["cuEventSynchronize in a thread without a context"]
        assert len(cuda.violations) == len(broken) + 1


def test_pageable_memory_is_no_target_of_a_copy() -> None:
    cuda = FakeCuda()
    with closing(cuda):
        pool = pool_on(cuda)
        unit = pool.granularity
        base = int(pool.call("cuMemAddressReserve", unit, unit, 0, 0))
        pool.call("cuMemMap", base, unit, 0, pool.call("cuMemCreate", unit, pool._prop, 0), 0)
        pool.call("cuMemSetAccess", base, unit, pool.access, 1)
        pageable = ctypes.create_string_buffer(64)
        with pytest.raises(DriverError):
            pool.call("cuMemcpyHtoDAsync", base, ctypes.addressof(pageable), 64, pool.call("cuStreamCreate", 1))
        assert "pageable" in cuda.violations[-1]
