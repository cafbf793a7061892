"""The elastic allocators against a model made of sets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_nightjar.memory.elastic_allocator import ElasticAllocator, ElasticPagedAllocator, ElasticTokenAllocator

MOST_PAGES = 24


def make(page_size: int, pages: int) -> ElasticAllocator:
    common: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    if page_size == 1:
        return ElasticTokenAllocator(pages, **common)
    allocator = ElasticPagedAllocator(pages * page_size, page_size=page_size, **common)
    allocator.use_triton_kernels = False  # as on the CPU platform
    return allocator


def ids(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


class Elastic(RuleBasedStateMachine):
    """`owners`: slots of each, in order. `pending`: pages freed in the open group, so still in use."""

    @initialize(page_size=st.sampled_from([1, 4, 16]), pages=st.integers(1, MOST_PAGES))
    def start(self, page_size: int, pages: int) -> None:
        self.page_size, self.pages = page_size, pages
        self.ceiling: int | None = None
        self.owners: list[list[int]] = []
        self.pending: set[int] = set()
        self.allocator = make(page_size, pages)

    def pages_of(self, slots: list[int]) -> list[int]:
        return list(dict.fromkeys(slot // self.page_size for slot in slots))

    def used(self) -> set[int]:
        held = [page for slots in self.owners for page in self.pages_of(slots)]
        assert len(held) == len(set(held)) and not self.pending & set(held)
        return self.pending | set(held)

    def free_pages(self, limit: int | None = None) -> list[int]:
        used, limit = self.used(), self.pages if limit is None else min(limit, self.pages)
        return [page for page in range(1, limit + 1) if page not in used]

    def grown(self, lengths: dict[int, int]) -> tuple[list[int], list[list[int]]] | None:
        """Slots that owners of these new lengths get, lowest pages first, and what each then has."""
        free, given, after = iter(self.free_pages(self.ceiling)), [], []
        for owner, length in lengths.items():
            slots = list(self.owners[owner])
            for position in range(len(slots), length):
                if position % self.page_size:
                    slots.append(slots[-1] + 1)
                elif (page := next(free, None)) is not None:
                    slots.append(page * self.page_size)
                else:
                    return None
                given.append(slots[-1])
            after.append(slots)
        return given, after

    # -- what upstream's allocators do --

    @rule(count=st.integers(0, 9))
    def alloc(self, count: int) -> None:
        free = self.free_pages(self.ceiling)
        slots = self.allocator.alloc(count * self.page_size)
        if count > len(free):
            assert slots is None
            return
        expected = [page * self.page_size + at for page in free[:count] for at in range(self.page_size)]
        assert slots is not None and slots.tolist() == expected and slots.dtype == torch.int64
        self.owners.append(expected)

    @rule(data=st.data(), decode=st.booleans())
    def extend(self, data: st.DataObject, decode: bool) -> None:
        """A batch of known owners and new ones, each longer by some tokens, or by one."""
        if self.page_size == 1:
            return
        self.owners += [[]] * (0 if decode else data.draw(st.integers(0, 2)))
        batch = data.draw(st.lists(st.sampled_from(range(len(self.owners))), unique=True)) if self.owners else []
        batch = [owner for owner in batch if self.owners[owner]] if decode else batch
        lengths = {
            owner: len(self.owners[owner]) + (1 if decode else data.draw(st.integers(1, 3 * self.page_size)))
            for owner in batch
        }
        before = ids([len(self.owners[owner]) for owner in batch])
        last = ids([self.owners[owner][-1] if self.owners[owner] else -1 for owner in batch])
        after = ids(list(lengths.values()))
        if decode:
            slots = self.allocator.alloc_decode(after, after, last)
        else:
            slots = self.allocator.alloc_extend(before, before, after, after, last, int((after - before).sum()))
        expected = self.grown(lengths)
        if expected is None:
            assert slots is None
        else:
            assert slots.tolist() == expected[0] and slots.dtype == torch.int64
            for owner, owned in zip(batch, expected[1], strict=True):
                self.owners[owner] = owned
        self.owners = [slots for slots in self.owners if slots]

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), how=st.sampled_from(["slots", "int32", "segment", "pages"]))
    def free(self, data: st.DataObject, how: str) -> None:
        slots = self.owners.pop(data.draw(st.sampled_from(range(len(self.owners)))))
        if how == "pages":
            self.allocator.free_page_ids(ids(self.pages_of(slots)))
        elif how == "segment":
            self.allocator.free_segment(ids(slots), start_pos=0)
        else:
            self.allocator.free(ids(slots).to(torch.int32 if how == "int32" else torch.int64))
        if self.allocator.free_group is not None:
            self.pending |= set(self.pages_of(slots))

    @rule()
    def toggle_group(self) -> None:
        if self.allocator.free_group is None:
            self.allocator.free_group_begin()
        else:
            self.allocator.free_group_end()
            self.pending = set()

    @precondition(lambda self: len(self.owners) > 3)
    @rule()
    def clear(self) -> None:
        self.allocator.clear()
        self.owners, self.pending = [], set()

    # -- what ours add --

    @precondition(lambda self: self.pages < MOST_PAGES)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        self.pages = data.draw(st.integers(self.pages, MOST_PAGES))
        self.allocator.grow(self.pages * self.page_size)

    @rule(ceiling=st.none() | st.integers(0, MOST_PAGES + 1))
    def set_ceiling(self, ceiling: int | None) -> None:
        self.ceiling = ceiling
        self.allocator.set_ceiling(None if ceiling is None else ceiling * self.page_size)

    @rule(data=st.data())
    def relocate(self, data: st.DataObject) -> None:
        """As a contraction does, as far as there is room."""
        limit = data.draw(st.integers(0, self.pages))
        held = sorted(page for page in self.used() if page > limit)
        free = self.free_pages(limit)
        assert self.allocator.held_above(limit * self.page_size) == len(held) * self.page_size
        assert self.allocator.free_below(limit * self.page_size).tolist() == free
        if self.allocator.free_group is not None:
            return
        moves = dict(zip(held, free, strict=False))
        src, dst = ids(list(moves)), ids(list(moves.values()))
        self.allocator.take(dst)
        assert self.allocator.used() == (len(self.used()) + len(moves)) * self.page_size
        self.allocator.relocated(src, dst)
        page = self.page_size
        self.owners = [
            [moves.get(slot // page, slot // page) * page + slot % page for slot in slots] for slots in self.owners
        ]

    @rule(data=st.data())
    def take_and_give_back(self, data: st.DataObject) -> None:
        pages = data.draw(st.sets(st.sampled_from(self.free_pages()))) if self.free_pages() else set()
        self.allocator.take(ids(list(pages)))
        self.owners += [[page * self.page_size + at for at in range(self.page_size)] for page in pages]

    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        pages = data.draw(st.integers(0, self.pages))
        held = sum(page > pages for page in self.used()) * self.page_size
        if held:
            with pytest.raises(ValueError, match=f"{held} above are in use"):
                self.allocator.shrink(pages * self.page_size)
        else:
            self.allocator.shrink(pages * self.page_size)
            self.pages = pages

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check()
        free = self.free_pages()
        assert sorted(self.allocator.get_all_free_pages().tolist()) == free
        assert self.allocator.size == self.pages * self.page_size
        assert self.allocator.used() == (self.pages - len(free)) * self.page_size

    @rule()
    def count(self) -> None:
        """No invariant: counting may sort what was freed, which the other rules should meet unsorted too."""
        free, ready = len(self.free_pages()), len(self.free_pages(self.ceiling))
        assert self.allocator.available_size() == ready * self.page_size
        assert self.allocator.withheld() == (free - ready) * self.page_size


TestElastic = Elastic.TestCase
TestElastic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


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
