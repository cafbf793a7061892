"""The CUDA arena over a fake driver: two arenas against a model, tensors, the end of an arena."""

from contextlib import closing
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from cuda_world import UNITS, arena_on, no_fence, pool_on, state
from fake_cuda import FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.arena_cuda import cuda_arena
from sglang_nightjar.memory.cuda_driver import DriverError


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, int | None]:
    """Which arena, a range of units, and after how many driver calls one fails."""
    start = draw(st.integers(0, UNITS - 1))
    return draw(st.integers(0, 1)), start, draw(st.integers(start + 1, UNITS)), draw(st.none() | st.integers(0, 20))


@settings(max_examples=300, deadline=None)
@given(memory=st.integers(4, 2 * UNITS), plan=st.lists(steps() | st.just("trim"), max_size=14))
def test_two_arenas_follow_their_model(memory: int, plan: list[Any]) -> None:
    """Each range is committed where none of it is, decommitted where all of it is; a refusal changes nothing."""
    cuda = FakeCuda(memory=0)
    with closing(cuda):
        unit = cuda.unit
        cuda.memory = memory * unit
        pool = pool_on(cuda)
        arenas = [arena_on(pool), arena_on(pool)]
        addresses = [arena.address for arena in arenas]
        model: list[list[int | None]] = [[None] * UNITS, [None] * UNITS]  # the byte that fills each unit
        for number, step in enumerate(plan, 1):
            cuda.refuse.clear()
            if step == "trim":
                pool.trim()
                assert pool.spare == 0
                continue
            which, start, stop, fail_after = step
            arena, content, offsets = arenas[which], model[which], (start * unit, stop * unit)
            committed = [byte is not None for byte in content[start:stop]]
            change = arena.decommit if all(committed) else arena.commit
            if any(committed) and not all(committed):
                with pytest.raises(AssertionError, match="must not be committed"):
                    arena.commit(*offsets)
                continue
            before = state(cuda, pool)
            lacking = change == arena.commit and offsets[1] - offsets[0] - pool.spare > cuda.memory - cuda.used
            if fail_after is not None:
                cuda.refuse_next(fail_after)
            try:
                change(*offsets)
            except CommitError:
                assert cuda.refused() or lacking
                if cuda.refused() and lacking:  # what was created could not be released either: kept, and counted below
                    assert state(cuda, pool)[:2] == before[:2] and pool.spare <= before[3] + unit
                else:
                    assert state(cuda, pool) == before
            else:
                assert not cuda.refused() and not lacking
                if change == arena.commit:
                    fresh = arena.tensor(offsets[0], (offsets[1] - offsets[0],), torch.uint8)
                    assert not fresh.any()
                    fresh.fill_(number)
                content[start:stop] = [None if change == arena.decommit else number] * (stop - start)
            assert [arena.address for arena in arenas] == addresses
            for arena, content in zip(arenas, model, strict=True):
                assert arena.committed == unit * sum(byte is not None for byte in content)
                for index, byte in enumerate(content):
                    assert (arena.address + index * unit in cuda.accessible) == (byte is not None)
                    if byte is not None:
                        assert (arena.tensor(index * unit, (unit,), torch.uint8) == byte).all()
            assert cuda.used == sum(arena.committed for arena in arenas) + pool.spare
        cuda.refuse.clear()
        for arena in arenas:
            arena.close()
        pool.trim()
        assert not cuda.violations and cuda.used == len(cuda.held) == len(cuda.mappings) == len(cuda.reservations) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16])
def test_tensors_are_checked_against_the_arena(cuda: FakeCuda, dtype: torch.dtype) -> None:
    arena = arena_on(pool_on(cuda))
    whole = arena.tensor(0, (UNITS, arena.granularity // dtype.itemsize), dtype)
    assert whole.dtype == dtype and whole.data_ptr() == arena.address and whole.is_contiguous()
    for start, count in [(0, arena.size + 1), (arena.size, 1), (-64, 1), (0, 0)]:
        with pytest.raises(AssertionError, match="a tensor over"):
            arena.tensor(start, (count,), torch.uint8)
    with pytest.raises(AssertionError, match="elements of 4 bytes"):
        arena.tensor(2, (1,), torch.float32)


def test_a_tensor_elsewhere_is_noticed(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = arena_on(pool_on(cuda))
    monkeypatch.setattr(cuda, "view", lambda address, shape, dtype: torch.zeros(shape, dtype=dtype))
    with pytest.raises(AssertionError, match=f"not {arena.address + 64}: captured graphs"):
        arena.tensor(64, (4,), torch.float32)


def test_an_arena_is_closed_once_and_for_all(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    arena = arena_on(pool)
    unit = pool.granularity
    arena.commit(0, unit)
    arena.commit(3 * unit, 5 * unit)
    for left in (2 * unit, unit, 0):  # a unit more goes each time, then the next call is refused
        cuda.refuse_next(1)
        with pytest.raises(CommitError, match="not given back: cuMem"):
            arena.close()
        assert arena.committed == left
    assert arena.committed == 0 and len(cuda.reservations) == 1
    arena.close()
    arena.close()
    assert not cuda.reservations and pool.spare == cuda.used == 3 * unit
    for use in (
        lambda: arena.commit(0, unit),
        lambda: arena.decommit(0, unit),
        lambda: arena.tensor(0, (1,), torch.int8),
    ):
        with pytest.raises(AssertionError, match="the arena is closed"):
            use()


def test_no_address_space_says_what_to_lower(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    cuda.refuse_next(0)
    with pytest.raises(
        CommitError, match=f"no {64 * pool.granularity} bytes .*CUDA_ERROR_OUT_OF_MEMORY; lower --night"
    ):
        arena_on(pool, units=64)
    assert not cuda.reservations


def test_a_device_without_virtual_memory_is_named(cuda: FakeCuda) -> None:
    cuda.result = driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    cuda.refuse_next(4)  # the context is there by then
    with pytest.raises(DriverError, match="cuMemGetAllocationGranularity: CUDA_ERROR_NOT_SUPPORTED"):
        pool_on(cuda)


def test_room_for_any_number_of_bytes(cuda: FakeCuda) -> None:
    pool = pool_on(cuda)
    unit = pool.granularity
    assert [cuda_arena(nbytes, pool, no_fence).size for nbytes in (1, unit, unit + 1)] == [unit, unit, 2 * unit]
