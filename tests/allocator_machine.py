"""Test support: the elastic allocators against a model made of sets, and with KV memory under what they hand out."""

from typing import Any

import pytest
import torch
from arena_kinds import Kind
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_nightjar.kernels.kv_relocate import expand_pages, kv_relocate
from sglang_nightjar.memory.arena import Regions
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
    """`owners`: slots of each, in order. `pending`: pages freed in the open group, so still in use.

    Below the allocator lies a buffer of as many rows, on memory that a draft has given up; every slot in use has
    memory, and holds what was written there (`contents`) wherever it has moved to.
    """

    kind: Kind

    @initialize(page_size=st.sampled_from([1, 4, 16]), pages=st.integers(1, MOST_PAGES))
    def start(self, page_size: int, pages: int) -> None:
        self.page_size, self.pages = page_size, pages
        self.ceiling: int | None = None
        self.owners: list[list[int]] = []
        self.pending: set[int] = set()
        self.allocator = make(page_size, pages)
        self.contents: dict[int, int] = {}
        self.written = 0
        self.place = self.kind.place(self)
        memory, rows = self.place.memory, (MOST_PAGES + 1) * page_size
        row_bytes = memory.granularity // 16
        size = Regions.reserved_bytes(1, rows, row_bytes, memory.granularity)
        self.regions = Regions(memory.arena(size), 1, rows, row_bytes)
        self.buffer = self.regions.tensor(0, (row_bytes // 8,), torch.int64)
        draft = memory.arena(size)
        draft.commit(0, draft.size)
        self.place.fill()
        draft.decommit(0, draft.size)

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.place.check_handed_over()
            self.place.end()

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
        moved_slots = expand_pages(src, dst, self.page_size)
        kv_relocate([self.buffer], *moved_slots)
        for slot, target in zip(*(slots.tolist() for slots in moved_slots), strict=True):
            if slot in self.contents:
                self.contents[target] = self.contents.pop(slot)
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

    @invariant()
    def every_slot_in_use_has_memory_and_keeps_its_contents(self) -> None:
        if not hasattr(self, "regions"):
            return
        self.regions.resize((self.pages + 1) * self.page_size)
        in_use = [slot for slots in self.owners for slot in slots]
        new = [slot for slot in in_use if slot not in self.contents]
        tags = range(self.written, self.written + len(new))
        self.written += len(new)
        self.contents = {slot: self.contents[slot] for slot in in_use if slot in self.contents}
        assert self.buffer[ids(list(self.contents)), -1].tolist() == list(self.contents.values())
        self.buffer[ids(new)] = torch.tensor(tags, dtype=torch.int64)[:, None]
        self.contents |= dict(zip(new, tags, strict=True))

    @rule()
    def count(self) -> None:
        """No invariant: counting may sort what was freed, which the other rules should meet unsorted too."""
        free, ready = len(self.free_pages()), len(self.free_pages(self.ceiling))
        assert self.allocator.available_size() == ready * self.page_size
        assert self.allocator.withheld() == (free - ready) * self.page_size
