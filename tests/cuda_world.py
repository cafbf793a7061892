"""Test support: arenas, and what belongs to them, over the fake driver."""

from collections.abc import Callable
from typing import Any

from fake_cuda import FakeCuda

from sglang_nightjar.memory.arena_cuda import CudaArena, HandlePool
from sglang_nightjar.memory.cuda_driver import CudaDriver
from sglang_nightjar.memory.device_cuda import CudaDevice

UNITS = 6  # of an arena


def no_fence() -> None:
    """Nothing runs."""


def pool_on(cuda: FakeCuda) -> HandlePool:
    return HandlePool(CudaDriver(0, cuda), cuda)


def arena_on(pool: HandlePool, units: int = UNITS, fence: Callable[[], None] = no_fence) -> CudaArena:
    return CudaArena(units * pool.granularity, pool, fence)


def device_on(cuda: FakeCuda) -> CudaDevice:
    return CudaDevice(0, bindings=cuda, tensors=cuda)


def state(cuda: FakeCuda, pool: HandlePool) -> tuple[Any, ...]:
    """All that a refused call must leave as it was."""
    return dict(cuda.mappings), set(cuda.accessible), set(cuda.held), pool.spare, cuda.used
