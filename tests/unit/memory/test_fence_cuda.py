"""The fence: taking memory away waits for what was launched before, and refuses where that cannot be known."""

import pytest
from cuda_world import device_on
from fake_cuda import FakeCuda

from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.device_cuda import CudaDevice


def test_memory_goes_after_the_work_that_uses_it(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    arena = device.arena(2 * device.granularity)
    arena.commit(0, arena.size)
    cuda.use(arena.address, arena.size)
    device.mark()
    other = device.arena(device.granularity)
    other.commit(0, other.size)
    cuda.use(other.address, other.size)  # launched later: a step that does not use the first arena
    arena.decommit(0, arena.size)
    assert cuda.in_use(other.address, other.size), "nobody waits for what was launched after the mark"
    cuda.complete()


def test_without_a_mark_the_memory_is_taken_from_under_the_work(cuda: FakeCuda) -> None:
    """So the test above would notice."""
    device = device_on(cuda)
    arena = device.arena(device.granularity)
    arena.commit(0, arena.size)
    cuda.use(arena.address, arena.size)
    with pytest.raises(CommitError):
        arena.decommit(0, arena.size)
    assert "which a stream is using" in cuda.violations.pop()


def test_every_stream_is_waited_for(cuda: FakeCuda) -> None:
    streams: list[int] = []
    device = CudaDevice(0, streams=lambda: streams, bindings=cuda, tensors=cuda)
    streams += [0, int(device.pool.call("cuStreamCreate", 1))]
    arena = device.arena(2 * device.granularity)
    arena.commit(0, arena.size)
    for index, stream in enumerate(streams):
        cuda.use(arena.address + index * device.granularity, device.granularity, stream)
    device.mark()
    arena.decommit(0, arena.size)
    assert cuda.calls.count("cuEventSynchronize") == 2


def test_a_mark_costs_one_record_per_stream(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    device.mark()
    before = len(cuda.calls)
    for _ in range(3):
        device.mark()
    assert cuda.calls[before:] == 3 * ["cuEventRecord"]


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuEventSynchronize"])
def test_a_fence_that_fails_keeps_the_memory_and_the_next_one_counts(cuda: FakeCuda, call: str) -> None:
    device = device_on(cuda)
    arena = device.arena(device.granularity)
    arena.commit(0, arena.size)
    cuda.use(arena.address, arena.size)
    cuda.refuse_next(["cuEventCreate", "cuEventRecord", "cuEventSynchronize"].index(call))
    device.mark()  # the scheduler's loop must not stop at it
    with pytest.raises(CommitError, match=f"may still use it: {call}"):
        arena.decommit(0, arena.size)
    assert arena.committed == arena.size and cuda.in_use(arena.address, 1)
    device.mark()
    arena.decommit(0, arena.size)
