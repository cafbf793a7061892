"""Test support: one rank's residency over pools and weights that fail on demand.

Pools and weights are as large as they say, on host memory or on a fake CUDA device that is full: there the
target's tail lies on what the draft has given up, or nothing would grow.
"""

import os
import threading
import time
from collections.abc import Callable

from arena_kinds import Kind, Place

from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.memory.arena import Arena, CommitError, Regions
from sglang_nightjar.memory.ledger import Account, Ledger
from sglang_nightjar.memory.pools import PoolSizes
from sglang_nightjar.memory.relocate import Contraction
from sglang_nightjar.memory.residency import DraftResidency

SMALL, LARGE = 100, 160
SLOT = 2 * os.sysconf("SC_PAGE_SIZE")  # bytes, of one buffer: a unit of the fake device
WEIGHTS, CHUNKS = 40 * SLOT, 4
SIZES = PoolSizes(SMALL, LARGE, weights_only=140)


class FakePool:
    def __init__(self, place: Place, slots: int) -> None:
        self.regions = Regions(place.memory.arena(LARGE * SLOT), 1, LARGE, SLOT)
        self.regions.resize(slots)
        self.slots = slots
        self.told = slots
        self.full = False

    @property
    def nbytes(self) -> int:
        return self.slots * SLOT

    def bytes_for(self, slots: int) -> int:
        return slots * SLOT

    def resize(self, slots: int) -> None:
        if self.full and slots > self.slots:
            raise CommitError("no memory for the pool")
        self.regions.resize(slots)
        self.slots = slots

    def resized(self, slots: int) -> None:
        self.told = slots


class FakeAllocator:
    def __init__(self) -> None:
        self.size = SMALL

    def grow(self, size: int) -> None:
        assert size > self.size
        self.size = size

    def shrink(self, size: int) -> None:
        assert size < self.size
        self.size = size


class FakeStore:
    nbytes = WEIGHTS

    def __init__(self, place: Place) -> None:
        self.arena: Arena = place.memory.arena(WEIGHTS)
        self.arena.commit(0, WEIGHTS)
        self.fault: BaseException | None = None
        self.broken: str | None = None
        self.copied = 0
        self.stuck: threading.Event | None = None

    @property
    def resident(self) -> bool:
        return self.arena.committed > 0

    def release(self) -> None:
        self.arena.decommit(0, WEIGHTS)

    def reload(self, chunk_bytes: int, before_chunk: Callable[[], None]) -> None:
        if self.stuck is not None:
            self.stuck.wait(10)
        self.arena.commit(0, WEIGHTS)
        try:
            for _ in range(CHUNKS):
                before_chunk()
                if self.fault is not None:
                    raise self.fault
                self.copied += chunk_bytes
        except BaseException:
            self.arena.decommit(0, WEIGHTS)
            raise

    def intact(self) -> str | None:
        return self.broken


class Rank:
    def __init__(self, kind: Kind) -> None:
        self.place = kind.place(self)
        self.store, self.target, self.draft, self.allocator = (
            FakeStore(self.place),
            FakePool(self.place, SMALL),
            FakePool(self.place, SMALL),
            FakeAllocator(),
        )
        self.place.fill()
        self.ledger = Ledger(2 * SMALL * SLOT + WEIGHTS)
        self.ledger.transfer(
            {Account.TARGET_KV: SMALL * SLOT, Account.DRAFT_KV: SMALL * SLOT, Account.DRAFT_WEIGHTS: WEIGHTS}
        )
        self.capacity = SMALL
        self.lost = 0
        self.in_the_way = 0  # attempts to shrink that fail
        self.kept: list[bool] = []
        self.memory = DraftResidency(
            ledger=self.ledger,
            store=self.store,  # type: ignore[arg-type]
            target_pool=self.target,
            draft_pool=self.draft,
            allocator=self.allocator,
            sizes=SIZES,
            chunk_bytes=100,
            shrink=self.shrink,
            on_capacity=self.set_capacity,
            on_draft_lost=self.lose,
            before_work=self.place.memory.mark,
        )

    def shrink(self, limit: int, keep_cached: bool) -> Contraction:
        self.kept.append(keep_cached)
        if self.in_the_way:
            self.in_the_way -= 1
            return Contraction(short=7)
        return Contraction(moved=5, dropped=2)

    def set_capacity(self, slots: int) -> None:
        self.capacity = slots

    def lose(self) -> None:
        self.lost += 1

    def finish(self) -> str | None:
        """Iterates until the work of the last turn has ended; why it failed."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            self.memory.iterate()
            ended = self.memory.outcome()
            if ended is not None:
                return ended[1]
            time.sleep(0.001)
        raise AssertionError("the work does not end")

    def evict(self) -> None:
        self.memory.make(Turn.EVICT)
        assert self.finish() is None
        self.memory.make(Turn.EVICTED, LARGE)

    def reload(self) -> None:
        self.memory.make(Turn.RELOAD)
        assert self.finish() is None
        self.memory.make(Turn.RESIDENT)

    def check(self) -> None:
        """The ledger holds what is there, and everyone knows the size."""
        assert self.ledger.held(Account.TARGET_KV) == self.target.nbytes
        assert self.ledger.held(Account.DRAFT_KV) == self.draft.nbytes
        assert self.ledger.held(Account.DRAFT_WEIGHTS) == (WEIGHTS if self.store.resident else 0)
        assert self.memory.slots == self.capacity == self.allocator.size == self.target.told
        for pool in (self.target, self.draft):
            assert pool.regions.committed_rows == pool.slots
        self.place.check_handed_over()
