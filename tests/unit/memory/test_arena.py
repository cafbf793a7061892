"""Buffers that resize together: rows that stay keep their contents, a refusal changes nothing."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.memory.arena import CommitError, Regions
from sglang_nightjar.memory.arena_posix import PosixArena, resident

PAGE = os.sysconf("SC_PAGE_SIZE")


class RefusingArena(PosixArena):
    """Refuses the call number `refuse_at` from now on, counting commits and decommits from 0."""

    refuse_at = -1

    def commit(self, start: int, stop: int) -> None:
        self._count()
        super().commit(start, stop)

    def decommit(self, start: int, stop: int) -> None:
        self._count()
        super().decommit(start, stop)

    def _count(self) -> None:
        self.refuse_at -= 1
        if self.refuse_at == -1:
            raise CommitError("refused")


SHAPES = st.tuples(
    st.sampled_from([PAGE, 4 * PAGE]),  # granularity
    st.integers(1, 3),  # buffers
    st.integers(1, 200),  # most rows
    st.sampled_from([1, 24, 96, PAGE, PAGE + 64]),  # bytes per row
)


@settings(max_examples=150, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_regions_keep_rows_and_refusals_change_nothing(shape: tuple[int, int, int, int], data: st.DataObject) -> None:
    granularity, count, rows_max, row_bytes = shape
    arena = RefusingArena(Regions.reserved_bytes(count, rows_max, row_bytes, granularity), granularity)
    regions = Regions(arena, count, rows_max, row_bytes)
    buffers = [regions.tensor(index, (row_bytes,), torch.uint8) for index in range(count)]
    rows_now = 0
    pattern = torch.arange(1, rows_max + 1)[:, None].expand(rows_max, row_bytes).to(torch.uint8)
    for _ in range(data.draw(st.integers(1, 6))):
        rows = data.draw(st.integers(0, rows_max))
        before = arena.committed
        arena.refuse_at = data.draw(st.integers(-1, count - 1))
        refused = arena.refuse_at >= 0 and regions.bytes_for(rows) != before
        if refused:
            with pytest.raises(CommitError):
                regions.resize(rows)
            assert arena.committed == before
            rows_now = min(rows_now, rows)  # a shrink may have cleared the rows above
        else:
            regions.resize(rows)
            assert arena.committed == regions.bytes_for(rows) == resident(arena.address, arena.size)
            for index, buffer in enumerate(buffers):
                assert torch.equal(buffer[: min(rows, rows_now)], pattern[: min(rows, rows_now)] + index)
                buffer[:rows] = pattern[:rows] + index
            rows_now = rows
        usable = regions.committed_rows
        assert rows_now <= usable and regions.bytes_for(usable) == arena.committed
        for index, buffer in enumerate(buffers):
            assert torch.equal(buffer[:rows_now], pattern[:rows_now] + index)
            buffer[rows_now:usable] = 0  # all usable rows may be written


@given(shape=SHAPES, budget=st.integers(0, 40 * PAGE))
def test_rows_for_is_the_most_that_fits(shape: tuple[int, int, int, int], budget: int) -> None:
    granularity, count, rows_max, row_bytes = shape
    arena = PosixArena(Regions.reserved_bytes(count, rows_max, row_bytes, granularity), granularity)
    regions = Regions(arena, count, rows_max, row_bytes)
    rows = regions.rows_for(budget)
    assert regions.bytes_for(rows) <= budget
    assert rows == rows_max or regions.bytes_for(rows + 1) > budget
    assert regions.bytes_for(rows_max) == arena.size


def test_a_grow_refused_at_any_buffer_leaves_what_was_written() -> None:
    for refuse_at in range(3):
        arena = RefusingArena(Regions.reserved_bytes(3, 1024, 64, PAGE))
        regions = Regions(arena, 3, 1024, 64)
        regions.resize(64)
        buffers = [regions.tensor(index, (4, 4), torch.float32) for index in range(3)]
        assert [buffer.data_ptr() - arena.address for buffer in buffers] == [0, 1024 * 64, 2 * 1024 * 64]
        for buffer in buffers:
            buffer[:64] = 1.5
        arena.refuse_at = refuse_at
        with pytest.raises(CommitError):
            regions.resize(1024)
        assert regions.committed_rows == 64 and arena.committed == 3 * PAGE
        assert resident(arena.address, arena.size) == 3 * PAGE
        regions.resize(1024)
        for buffer in buffers:
            assert (buffer[:64] == 1.5).all() and not buffer[64:].any()


def test_regions_refuse_what_does_not_fit() -> None:
    arena = PosixArena(4 * PAGE)
    with pytest.raises(AssertionError, match=f"need {8 * PAGE} bytes"):
        Regions(arena, 2, 4, PAGE)
    regions = Regions(arena, 2, 2, PAGE)
    with pytest.raises(AssertionError, match="3 rows in buffers of at most 2"):
        regions.resize(3)
    with pytest.raises(AssertionError, match=f"rows of {PAGE} bytes seen as 32 bytes"):
        regions.tensor(0, (8,), torch.float32)
