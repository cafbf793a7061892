"""The elastic allocators against a model made of sets, over host memory and over the fake CUDA device."""

from types import SimpleNamespace

import pytest
from allocator_machine import Elastic, ids, make
from arena_kinds import Kind
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test


def test_any_history(kind: Kind) -> None:
    machine = type("Elastic", (Elastic,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_tail_drains_and_leaves(page_size: int) -> None:
    allocator = make(page_size, 8)
    low, high = allocator.alloc(5 * page_size), allocator.alloc(2 * page_size)
    allocator.set_ceiling(6 * page_size)
    assert (allocator.available_size(), allocator.withheld()) == (0, page_size)
    allocator.free(low[page_size : 2 * page_size])
    assert (
        allocator.alloc(2 * page_size) is None
        and allocator.alloc(page_size).tolist() == low[page_size : 2 * page_size].tolist()
    )
    with pytest.raises(ValueError, match=f"from {8 * page_size} to {6 * page_size} slots: {page_size} above"):
        allocator.shrink(6 * page_size)
    allocator.free(high)
    assert (allocator.available_size(), allocator.withheld()) == (page_size, 2 * page_size)
    allocator.shrink(6 * page_size)
    assert (allocator.size, allocator.used(), allocator.available_size()) == (6 * page_size, 5 * page_size, page_size)
    allocator.set_ceiling(None)
    allocator.grow(7 * page_size)
    assert allocator.free_below(7 * page_size).tolist() == [6, 7]


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_once_given_do_not_change(page_size: int) -> None:
    """Upstream gives out views of the free list; what is freed later must not be written into them."""
    allocator = make(page_size, 8)
    first, second = allocator.alloc(2 * page_size), allocator.alloc(2 * page_size)
    given = second.tolist()
    allocator.free(first.clone())
    allocator.alloc(page_size)
    assert second.tolist() == given


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_ceiling_outlives_clear_and_upstream_resize(page_size: int) -> None:
    allocator = make(page_size, 8)
    allocator.set_ceiling(3 * page_size)
    allocator.clear()
    assert (allocator.available_size(), allocator.withheld()) == (3 * page_size, 5 * page_size)
    allocator.resize(SimpleNamespace(max_total_num_tokens=5 * page_size))
    assert (allocator.available_size(), allocator.withheld()) == (3 * page_size, 2 * page_size)
    allocator.check()


def test_frees_of_a_group_count_when_it_ends() -> None:
    allocator = make(4, 4)
    slots = allocator.alloc(16)
    allocator.free_group_begin()
    allocator.free(slots[:4])
    allocator.free_segment(slots[8:], start_pos=8)
    assert (allocator.available_size(), allocator.held_above(0)) == (0, 16)
    with pytest.raises(AssertionError, match="1 frees are pending"):
        allocator.relocated(ids([4]), ids([1]))
    allocator.free_group_end()
    assert allocator.free_below(16).tolist() == [1, 3, 4]


def test_what_is_not_free_cannot_be_taken() -> None:
    allocator = make(4, 4)
    allocator.alloc(8)
    for pages in ([2, 3], [3, 3], [5]):
        with pytest.raises(AssertionError, match="1 are not free or named twice"):
            allocator.take(ids(pages))
    assert allocator.free_below(16).tolist() == [3, 4]


def test_only_what_is_in_use_can_be_relocated() -> None:
    allocator = make(4, 6)
    allocator.alloc(16)
    for src, dst, problem in (
        ([4], [5], "of 2 relocated pages and their targets, 1 are not in use"),
        ([6], [1], "of 2 relocated pages and their targets, 1 are not in use"),
        ([4, 4], [1, 2], "1 pages are named twice"),
        ([3, 4], [1], "2 pages relocated to 1"),
    ):
        with pytest.raises(AssertionError, match=problem):
            allocator.relocated(ids(src), ids(dst))
    assert allocator.free_below(24).tolist() == [5, 6]


def test_check_finds_a_page_freed_twice_and_one_outside() -> None:
    for page, problem in ((2, "1 of 3 free pages are listed twice"), (9, r"1 free pages are outside 1 \.\. 4")):
        allocator = make(4, 4)
        allocator.alloc(12)
        allocator.free_page_ids(ids([2]))
        allocator.check()
        allocator.free_page_ids(ids([page]))
        with pytest.raises(AssertionError, match=problem):
            allocator.check()


def test_sizes_are_whole_pages_and_moves_go_one_way() -> None:
    allocator = make(4, 4)
    with pytest.raises(AssertionError, match="18 slots are not whole pages of 4"):
        allocator.grow(18)
    with pytest.raises(AssertionError, match="grow to 12 slots, but the pool has 16"):
        allocator.grow(12)
    with pytest.raises(AssertionError, match="shrink to 20 slots, but the pool has 16"):
        allocator.shrink(20)
