"""The CUDA arena when the driver refuses: any call of a commit or decommit, undoing, releasing; and its fence."""

import pytest
import torch
from cuda_world import arena_on, pool_on, state
from fake_cuda import FakeCuda

from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.cuda_driver import DriverError


@pytest.mark.parametrize("spare", [0, 2])
def test_a_commit_refused_at_any_call_changes_nothing(cuda: FakeCuda, spare: int) -> None:
    pool = pool_on(cuda)
    arena, other = arena_on(pool), arena_on(pool)
    unit = arena.granularity
    arena.commit(0, unit)
    if spare:
        other.commit(0, spare * unit)
        other.decommit(0, spare * unit)
    before, named = state(cuda, pool), set()
    needed = (4 - spare) + 4 + 1 + 1  # create, map, one for access, one for zeros
    for after in range(needed):
        cuda.refuse_next(after)
        with pytest.raises(CommitError, match=f"no memory for {4 * unit} bytes at offset {unit}: ") as refusal:
            arena.commit(unit, 5 * unit)
        named.add(str(refusal.value).rsplit(": ", 2)[1])
        assert state(cuda, pool) == before and arena.committed == unit
    assert named == {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "CUDA error"}
    calls = len(cuda.calls)
    arena.commit(unit, 5 * unit)
    assert len(cuda.calls) - calls == needed and pool.spare == 0


def test_a_decommit_refused_at_any_call_keeps_contents_and_handles(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    arena = arena_on(pool)
    unit = arena.granularity
    arena.commit(0, 4 * unit)
    whole = arena.tensor(0, (4 * unit,), torch.uint8)
    whole[:] = torch.arange(4 * unit) // unit + 1
    before = state(cuda, pool)
    for after in range(3):
        cuda.refuse_next(after)
        with pytest.raises(
            CommitError, match=f"{3 * unit} bytes at offset {unit} not given back: cuMemUnmap: CUDA_ERR"
        ):
            arena.decommit(unit, 4 * unit)
        assert state(cuda, pool) == before and arena.committed == 4 * unit
        assert whole[::unit].tolist() == [1, 2, 3, 4]
    arena.decommit(unit, 4 * unit)
    assert arena.committed == unit and pool.spare == 3 * unit and (whole[:unit] == 1).all()


def test_what_is_spare_goes_back_to_the_device_when_asked(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    arena = arena_on(pool)
    arena.commit(0, 3 * pool.granularity)
    arena.decommit(0, 3 * pool.granularity)
    cuda.refuse_next(1)
    with pytest.raises(CommitError, match=f"{pool.granularity} bytes not given back: cuMemRelease: CUDA_ERROR_OUT"):
        pool.trim()
    assert pool.spare == cuda.used == pool.granularity
    pool.trim()
    assert pool.spare == cuda.used == 0


def test_new_handles_that_cannot_be_released_are_not_lost(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    arena = arena_on(pool)
    calls = len(cuda.calls)
    cuda.refuse = {calls + 2, calls + 3}  # the third handle, and releasing the first
    with pytest.raises(CommitError, match="cuMemCreate"):
        arena.commit(0, 3 * pool.granularity)
    assert arena.committed == 0 and pool.spare == cuda.used == pool.granularity
    arena.commit(0, 3 * pool.granularity)
    assert pool.spare == 0


def test_a_refused_undoing_is_no_commit_error(cuda: FakeCuda) -> None:
    """A `CommitError` says that nothing has changed; here a unit stays mapped, and its handle goes to nobody."""
    pool = pool_on(cuda)
    arena = arena_on(pool)
    calls = len(cuda.calls)
    cuda.refuse = {calls + 3, calls + 4}  # the second map, and unmapping the first
    with pytest.raises(DriverError, match="cuMemUnmap: CUDA_ERROR_OUT_OF_MEMORY"):
        arena.commit(0, 2 * pool.granularity)
    assert pool.spare == 0 and len(cuda.mappings) == 1


def test_the_fence_comes_before_the_first_unmap(cuda: FakeCuda) -> None:
    events: list[str] = []

    def fence() -> None:
        events.append("fence")
        cuda.complete()

    pool = pool_on(cuda)
    arena = arena_on(pool, fence=fence)
    unit = pool.granularity
    arena.commit(0, 4 * unit)
    assert events == []  # nothing is taken away
    cuda.use(arena.address, 4 * unit)
    arena.decommit(0, 2 * unit)
    assert events == ["fence"]
    cuda.use(arena.address + 2 * unit, 2 * unit)
    arena.close()
    assert events == ["fence", "fence"]


def test_a_fence_that_fails_changes_nothing(cuda: FakeCuda) -> None:
    def fence() -> None:
        raise RuntimeError("the event's stream has failed")

    pool = pool_on(cuda)
    arena = arena_on(pool, fence=fence)
    arena.commit(0, pool.granularity)
    before = state(cuda, pool)
    with pytest.raises(RuntimeError, match="the event's stream"):
        arena.decommit(0, pool.granularity)
    assert state(cuda, pool) == before and arena.committed == pool.granularity
