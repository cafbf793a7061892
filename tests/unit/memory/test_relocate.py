"""Contraction over random layouts: contents follow their owners, every index is renamed, or nothing is touched."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from arena_kinds import Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.memory.arena import Regions
from sglang_nightjar.memory.relocate import CachedNode, Contraction, MoveCosts, contract


class PageSet:
    """The allocator's part: pages 1 .. `pages`, each free or in use."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = pages
        self.free = set(range(1, pages + 1))

    def used(self) -> int:
        return (self.pages - len(self.free)) * self.page_size

    def held_above(self, limit: int) -> int:
        return (
            sum(page not in self.free for page in range(limit // self.page_size + 1, self.pages + 1)) * self.page_size
        )

    def free_below(self, limit: int) -> torch.Tensor:
        return torch.tensor(sorted(p for p in self.free if p <= limit // self.page_size), dtype=torch.int64)

    def take(self, pages: torch.Tensor) -> None:
        for page in pages.tolist():
            self.free.remove(page)

    def relocated(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        assert not self.free & set(dst.tolist())
        self.free |= set(src.tolist())


@dataclass
class World:
    """Requests whose first tokens are a cached prefix, and prefixes nobody holds, over random pages.

    The buffers' upper half lies on memory that a draft has given up.
    """

    kind: Kind
    seed: int
    pages: int
    page_size: int
    requests: int
    unheld: int
    rows_: list[tuple[int, int]] = field(default_factory=list)
    tree: dict[int, CachedNode] = field(default_factory=dict)
    in_prefill: bool = False
    finished: list[tuple[torch.Tensor, set[int]]] = field(default_factory=list)  # what it found, of each step finished

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.allocator = PageSet(self.pages, self.page_size)
        slots = (self.pages + 1) * self.page_size
        self.buffers = self.make_buffers(slots)
        self.req_to_token = torch.zeros((self.requests + 1, 64 * self.page_size), dtype=torch.int32)
        self.rng = rng
        for row in range(self.requests):
            shared, own = self.some_pages(), self.some_pages()
            if shared is None or own is None:
                break
            self.add_node(shared, locked=True)
            length = len(shared) + len(own) - rng.randrange(self.page_size)  # the last page is not full
            self.req_to_token[row, :length] = torch.cat([shared, own])[:length].to(torch.int32)
            self.rows_.append((row, length))
        for _ in range(self.unheld):
            slots_ = self.some_pages()
            if slots_ is not None:
                parents = [n.node for n in self.tree.values() if not n.locked]
                self.add_node(slots_, locked=False, parent=rng.choice(parents) if parents and rng.random() < 0.5 else 0)

    def make_buffers(self, slots: int) -> list[torch.Tensor]:
        place = self.kind.place(self)
        row = place.memory.granularity // 4  # bytes: so that a few slots fill a unit
        draft = place.memory.arena(4 * (slots * row // 2 + 2 * place.memory.granularity))
        regions = Regions(
            place.memory.arena(Regions.reserved_bytes(4, slots, row, place.memory.granularity)), 4, slots, row
        )
        regions.resize(slots // 2)
        draft.commit(0, draft.size)
        place.fill()
        draft.decommit(0, draft.size)
        regions.resize(slots)
        place.check_handed_over()
        buffers = [regions.tensor(index, (row // 4,), torch.float32) for index in range(4)]
        generator = torch.Generator().manual_seed(self.seed)
        for buffer in buffers:
            buffer[:, ::97] = torch.randn(buffer[:, ::97].shape, generator=generator)
        return buffers

    def some_pages(self) -> torch.Tensor | None:
        count = self.rng.randrange(1, 4)
        if len(self.allocator.free) < count:
            return None
        pages = torch.tensor(self.rng.sample(sorted(self.allocator.free), count))
        self.allocator.take(pages)
        return (pages.unsqueeze(1) * self.page_size + torch.arange(self.page_size)).flatten()

    def add_node(self, slots: torch.Tensor, *, locked: bool, parent: int = 0) -> None:
        node = len(self.tree) + 1
        self.tree[node] = CachedNode(node, parent, 0, slots.clone(), locked)
        if parent:
            self.tree[parent].children += 1

    def rows(self) -> list[tuple[int, int]]:
        return self.rows_

    def nodes(self) -> list[CachedNode]:
        return list(self.tree.values())

    def drop(self, node: int) -> None:
        gone = self.tree.pop(node)
        assert not gone.locked and all(other.parent != node for other in self.tree.values())
        self.allocator.free |= set((gone.slots // self.page_size).tolist())

    def evict(self, slots: int) -> int:
        evicted = 0
        for node in sorted(self.tree, reverse=True):  # children were made after their parents
            if not self.tree[node].locked and evicted < slots:
                evicted += len(self.tree[node].slots)
                gone = self.tree.pop(node)
                self.allocator.free |= set((gone.slots // self.page_size).tolist())
        return evicted

    def evictable(self) -> int:
        return sum(len(node.slots) for node in self.tree.values() if not node.locked)

    def prefilling(self) -> bool:
        return self.in_prefill

    def finish_step(self) -> None:
        self.finished.append((self.req_to_token.clone(), set(self.allocator.free)))

    def contents(self) -> list[torch.Tensor]:
        """K and V of every row and node, as their owners see them."""
        owned = [self.req_to_token[row, :length].to(torch.int64) for row, length in self.rows_]
        owned += [self.tree[node].slots for node in sorted(self.tree)]
        return [buffer[slots] for slots in owned for buffer in self.buffers]

    def contract(self, limit: int, keep_cached: bool) -> Contraction:
        return contract(
            limit,
            allocator=self.allocator,
            holders=self,
            req_to_token=self.req_to_token,
            buffers=self.buffers,
            keep_cached=keep_cached,
            finish_step=self.finish_step,
        )


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 4]),
    requests=st.integers(0, 6),
    unheld=st.integers(0, 6),
    kept=st.integers(2, 39),
    keep_cached=st.booleans(),
)
def test_owners_see_the_same_bytes(
    kind: Kind, seed: int, page_size: int, requests: int, unheld: int, kept: int, keep_cached: bool
) -> None:
    world = World(kind, seed, 40, page_size, requests, unheld)
    limit = kept * page_size
    locked = [node for node in world.tree if world.tree[node].locked]
    held = sum(length > 0 for _, length in world.rows_)
    before_nodes = dict(world.tree)
    before = {node: [b[world.tree[node].slots] for b in world.buffers] for node in world.tree}
    rows_before = world.contents()[: held * len(world.buffers)]
    done = world.contract(limit, keep_cached)
    assert all(map(torch.equal, rows_before, world.contents()[: held * len(world.buffers)]))
    assert set(locked) <= set(world.tree), "what a request holds is never dropped"
    for node, left in world.tree.items():
        assert left is before_nodes[node]
        assert all(torch.equal(b[left.slots], old) for b, old in zip(world.buffers, before[node], strict=True))
    dropped = sum(len(before_nodes[node].slots) for node in before_nodes.keys() - world.tree.keys())
    assert done.dropped == dropped
    if done.short:
        assert done.moved == done.dropped == 0 and world.tree == before_nodes, "nothing is touched"
    else:
        assert world.allocator.held_above(limit) == 0
        highest = max((int(node.slots.max()) for node in world.tree.values()), default=0)
        assert highest < limit + page_size
    named = {int(slot) // page_size for row, length in world.rows_ for slot in world.req_to_token[row, :length]}
    named |= {int(slot) // page_size for node in world.tree.values() for slot in node.slots}
    assert named.isdisjoint(world.allocator.free) and len(named) + len(world.allocator.free) == 40


def test_cached_prefixes_are_moved_where_that_is_cheaper(kind: Kind) -> None:
    kept, dropped = World(kind, 3, 40, 1, 1, 6), World(kind, 3, 40, 1, 1, 6)
    kept.contract(30, keep_cached=True)
    dropped.contract(30, keep_cached=False)
    assert len(kept.tree) > len(dropped.tree)


def test_nothing_is_touched_where_low_slots_do_not_suffice(kind: Kind) -> None:
    world = World(kind, 0, 40, 1, 6, 0)
    table, buffers = world.req_to_token.clone(), [buffer.clone() for buffer in world.buffers]
    free = set(world.allocator.free)
    done = world.contract(2, keep_cached=True)
    assert done.short > 0 and torch.equal(table, world.req_to_token) and free == world.allocator.free
    assert not world.finished, "and no step is waited for in vain"
    assert all(map(torch.equal, buffers, world.buffers))


def test_a_step_under_way_is_finished_before_anything_is_touched(kind: Kind) -> None:
    world = World(kind, 0, 40, 1, 6, 0)
    table, free = world.req_to_token.clone(), set(world.allocator.free)
    assert world.contract(32, keep_cached=True).moved > 0
    [(table_then, free_then)] = world.finished
    assert torch.equal(table_then, table) and free_then == free and not torch.equal(table, world.req_to_token)


def test_what_a_step_under_way_ends_is_not_moved(kind: Kind) -> None:
    """A request whose end was not known: its own slots are free, and its prefix is nobody's, once the step is over."""
    world = World(kind, 0, 40, 1, 6, 0)
    (row, length), *others = world.rows_
    prefix = world.tree[1]
    table = world.req_to_token.clone()

    def finish_step() -> None:
        world.allocator.free |= set(table[row, len(prefix.slots) : length].tolist())
        world.rows_, prefix.locked = others, False

    world.finish_step = finish_step  # type: ignore[method-assign]
    done = world.contract(32, keep_cached=True)
    assert done.short == 0 and world.allocator.held_above(32) == 0
    assert torch.equal(world.req_to_token[row], table[row]) and not torch.equal(world.req_to_token, table)


def test_a_chunked_prefill_is_let_finish(kind: Kind) -> None:
    world = World(kind, 3, 40, 1, 1, 6)
    world.in_prefill = True
    tree = dict(world.tree)
    assert world.contract(30, keep_cached=False).short > 0 and world.tree == tree
    world.in_prefill = False
    assert world.contract(30, keep_cached=False).short == 0


def test_a_slot_that_nobody_names_stops_it(kind: Kind) -> None:
    world = World(kind, 1, 40, 1, 1, 0)
    world.allocator.take(torch.tensor([max(world.allocator.free)]))
    with pytest.raises(AssertionError, match="requests and the radix tree name"):
        world.contract(30, keep_cached=True)


def test_worth_moving() -> None:
    costs = MoveCosts(move_s=1e-5, recompute_s=1e-3)
    assert costs.worth_moving(0.5) and not costs.worth_moving(0.001)
