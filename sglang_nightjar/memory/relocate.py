"""Contraction: everything alive leaves the tail of the KV pool, so that the tail can be given back.

Cached prefixes nobody holds are dropped or moved, whichever costs less; what running requests
hold moves to free low slots: K and V of all layers in one copy, then every index that named the
old slots. All of it happens between two steps, or none: where what is alive does not fit, or a
prompt is in the middle of a chunked prefill (its slots were promised at admission), nothing is
touched and the caller asks again later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_nightjar.kernels.kv_relocate import expand_pages, kv_relocate


@dataclass(slots=True)
class CachedNode:
    """A node of the radix tree.

    Attributes:
        node, parent: upstream's handles. children: how many of them the tree has.
        slots: int64 [n], the tree's own tensor: writing to it changes the tree.
        locked: whether a running request holds it.
    """

    node: int
    parent: int
    children: int
    slots: torch.Tensor
    locked: bool


class Holders(Protocol):
    """Whoever holds KV slots (`patches/kv_holders.py`)."""

    def rows(self) -> list[tuple[int, int]]:
        """Row of `req_to_token` and slots allocated there, of every request that has any."""
        ...

    def nodes(self) -> list[CachedNode]:
        """Every node of the radix tree, parents before children."""
        ...

    def drop(self, node: int) -> None:
        """Frees the slots of a leaf nobody holds."""
        ...

    def evict(self, slots: int) -> int:
        """Frees at least so many cached slots, least recently used first, as far as there are; how many."""
        ...

    def evictable(self) -> int:
        """Cached slots nobody holds."""
        ...

    def prefilling(self) -> bool:
        """Whether a prompt is in the middle of its prefill."""
        ...


class Allocator(Protocol):
    """What contraction asks of `memory/elastic_allocator.py`. `limit`: slots of the smaller pool."""

    page_size: int

    def used(self) -> int: ...

    def held_above(self, limit: int) -> int: ...

    def free_below(self, limit: int) -> torch.Tensor: ...

    def take(self, pages: torch.Tensor) -> None: ...

    def relocated(self, src: torch.Tensor, dst: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Seconds to move one KV slot, and to compute one token's KV anew; both as measured."""

    move_s: float
    recompute_s: float

    def worth_moving(self, reuse_probability: float) -> bool:
        """Whether a cached slot is cheaper moved than dropped."""
        return self.move_s < reuse_probability * self.recompute_s


@dataclass(frozen=True, slots=True)
class Contraction:
    """What was done. `moved`, `dropped`: slots. `short`: slots that were missing, and nothing was touched then."""

    moved: int = 0
    dropped: int = 0
    short: int = 0


def contract(
    limit: int,
    *,
    allocator: Allocator,
    holders: Holders,
    req_to_token: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    keep_cached: bool,
    finish_step: Callable[[], None],
) -> Contraction:
    """Empties the pool above its first `limit` slots.

    Args:
        limit: slots of the smaller pool, whole pages.
        req_to_token: int32 [requests, context], slots of each request's tokens; changed.
        buffers: K and V of every layer, [slots, ...]; changed.
        keep_cached: whether prefixes nobody holds are moved rather than dropped, as far as there is room
            (`MoveCosts.worth_moving`; all ranks must be told the same).
        finish_step: called where there is room, before anything is touched: no step is under way when it returns. What
            that step ends and frees only makes more room.
    Returns:
        What happened. After it every running request can still take a page.
    """
    page = allocator.page_size
    short = allocator.used() - holders.evictable() + len(holders.rows()) * page - limit
    if short > 0 or holders.prefilling():
        return Contraction(short=max(short, 1))
    finish_step()
    rows = holders.rows()
    dropped = 0 if keep_cached else _drop_tail(limit + page, holders)
    while (missing := allocator.held_above(limit) - len(allocator.free_below(limit)) * page) > 0:
        evicted = holders.evict(missing)
        assert evicted > 0, f"{missing} slots are missing below {limit}, and nothing cached is left to drop"
        dropped += evicted

    nodes = holders.nodes()
    held = [req_to_token[row, :length].to(torch.int64) for row, length in rows] + [node.slots for node in nodes]
    tail = torch.cat([slots[slots >= limit + page] for slots in held]) if held else torch.empty(0, dtype=torch.int64)
    src = torch.unique(tail // page)
    assert len(src) * page == allocator.held_above(limit), (
        f"{allocator.held_above(limit)} slots above {limit} are in use, requests and the radix tree name "
        f"{len(src) * page} of them"
    )
    if not len(src):
        return Contraction(dropped=dropped)
    dst = allocator.free_below(limit)[: len(src)]
    allocator.take(dst)
    kv_relocate(buffers, *expand_pages(src, dst, page))
    moved_to = torch.arange(int(src.max()) + 1, device=src.device)
    moved_to[src] = dst
    for row, length in rows:
        slots = req_to_token[row, :length]
        slots.copy_(_renamed(slots.to(torch.int64), moved_to, page))
    for node in nodes:
        node.slots.copy_(_renamed(node.slots, moved_to, page))
    allocator.relocated(src, dst)
    return Contraction(moved=len(src) * page, dropped=dropped)


def _drop_tail(first: int, holders: Holders) -> int:
    """Drops leaves nobody holds that have a slot from `first` on, and then what has become such a leaf."""
    dropped = 0
    nodes = {node.node: node for node in holders.nodes()}
    for node in reversed(nodes.values()):  # children before parents
        if node.locked or node.children or not bool((node.slots >= first).any()):
            continue
        dropped += len(node.slots)
        if node.parent in nodes:
            nodes[node.parent].children -= 1
        holders.drop(node.node)
    return dropped


def _renamed(slots: torch.Tensor, moved_to: torch.Tensor, page: int) -> torch.Tensor:
    """int64 `slots` after page i has moved to page `moved_to[i]`."""
    return moved_to[slots // page] * page + slots % page
