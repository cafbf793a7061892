"""Contraction over random layouts: contents follow their owners, every index is renamed, or nothing is touched."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    """Requests whose first tokens are a cached prefix, and prefixes nobody holds, over random pages."""

    seed: int
    pages: int
    page_size: int
    requests: int
    unheld: int
    rows_: list[tuple[int, int]] = field(default_factory=list)
    tree: dict[int, CachedNode] = field(default_factory=dict)
    in_prefill: bool = False

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.allocator = PageSet(self.pages, self.page_size)
        slots = (self.pages + 1) * self.page_size
        self.buffers = [torch.randn(slots, 3) for _ in range(4)]
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
    seed: int, page_size: int, requests: int, unheld: int, kept: int, keep_cached: bool
) -> None:
    world = World(seed, 40, page_size, requests, unheld)
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


def test_cached_prefixes_are_moved_where_that_is_cheaper() -> None:
    kept, dropped = World(3, 40, 1, 1, 6), World(3, 40, 1, 1, 6)
    kept.contract(30, keep_cached=True)
    dropped.contract(30, keep_cached=False)
    assert len(kept.tree) > len(dropped.tree)


def test_nothing_is_touched_where_low_slots_do_not_suffice() -> None:
    world = World(0, 40, 1, 6, 0)
    table, buffers = world.req_to_token.clone(), [buffer.clone() for buffer in world.buffers]
    free = set(world.allocator.free)
    done = world.contract(2, keep_cached=True)
    assert done.short > 0 and torch.equal(table, world.req_to_token) and free == world.allocator.free
    assert all(map(torch.equal, buffers, world.buffers))


def test_a_chunked_prefill_is_let_finish() -> None:
    world = World(3, 40, 1, 1, 6)
    world.in_prefill = True
    tree = dict(world.tree)
    assert world.contract(30, keep_cached=False).short > 0 and world.tree == tree
    world.in_prefill = False
    assert world.contract(30, keep_cached=False).short == 0


def test_a_slot_that_nobody_names_stops_it() -> None:
    world = World(1, 40, 1, 1, 0)
    world.allocator.take(torch.tensor([max(world.allocator.free)]))
    with pytest.raises(AssertionError, match="requests and the radix tree name"):
        world.contract(30, keep_cached=True)


def test_worth_moving() -> None:
    costs = MoveCosts(move_s=1e-5, recompute_s=1e-3)
    assert costs.worth_moving(0.5) and not costs.worth_moving(0.001)
