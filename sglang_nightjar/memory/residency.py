"""One rank's draft: on the device, leaving, away, or coming back; and the pool that grows and shrinks with it.

    RESIDENT --EVICT--> EVICTING --EVICTED--> EVICTED --RELOAD--> RELOADING --RESIDENT--> RESIDENT
                        EVICTING --RELOAD--> RELOADING            RELOADING --EVICT--> EVICTING      undone
                        EVICTING, RELOADING --EVICTED with the small pool--> EVICTED                 given up

Every arrow is a `Turn` that a directive carries, so all ranks make it at the same step. In between,
the slow part runs in a thread: it gives memory back and takes it, and copies weights in chunks,
one per scheduler iteration at most. Its end is reported; nothing depends on when.

EVICT: the draft's weights and KV are given back, the target's KV buffers grow into the room; the
pool has the new slots from EVICTED on. RELOAD: as soon as what is alive fits the small pool it is
moved there (`relocate.py`), the pool shrinks, and the draft's memory comes back.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.background import Background, Pace
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.ledger import Account, Ledger
from sglang_nightjar.memory.pools import Allocator, Pool, PoolSizes
from sglang_nightjar.memory.relocate import Contraction
from sglang_nightjar.policy.base import Residency

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Since the start, for `/server_info`: transitions, what moved, and how long each phase took, s.

    `copied`: bytes of weights. `most_copied`: of those, the most between two scheduler iterations of the last reload.
    """

    evictions: int = 0
    reloads: int = 0
    failures: int = 0
    postponed: int = 0
    moved_slots: int = 0
    dropped_slots: int = 0
    copied: int = 0
    most_copied: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # of the last of each kind


def _nothing() -> None:
    """No stream runs beside the thread that makes turns."""


class DraftResidency:
    """Carries out turns on this rank.

    Attributes:
        state: where the draft is.
        slots: of the KV pool now.
        sizes: the two it can have.
        counters: what has happened.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        store: DraftStore,
        target_pool: Pool,
        draft_pool: Pool,
        allocator: Allocator,
        sizes: PoolSizes,
        chunk_bytes: int,
        shrink: Callable[[int, bool], Contraction],
        on_capacity: Callable[[int], None],
        on_draft_lost: Callable[[], None],
        before_work: Callable[[], None] = _nothing,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Memory of both pools and of the store is charged to the ledger already.

        Args:
            chunk_bytes: most bytes of weights copied between two scheduler iterations.
            shrink: empties the pool above so many slots, or says what was missing; the second argument is
                whether cached prefixes are kept.
            on_capacity: tells everyone upstream how many slots there are.
            on_draft_lost: no slot holds draft KV any more.
            before_work: called by the thread that makes turns, before a thread begins to move memory
                (`DeviceMemory.mark`).
            clock: s, by which phases are timed.
        """
        self._ledger, self._store = ledger, store
        self._target, self._draft, self._allocator = target_pool, draft_pool, allocator
        self.sizes, self._chunk_bytes = sizes, chunk_bytes
        self._shrink, self._on_capacity, self._on_draft_lost = shrink, on_capacity, on_draft_lost
        self._before_work, self._clock = before_work, clock
        self.state = Residency.RESIDENT
        self.slots = sizes.small
        self.counters = Counters()
        self._work: Background | None = None
        self._turn = Turn.NONE  # which `_work` belongs to
        self._next: tuple[Turn, Callable[[Pace], None]] | None = None  # once `_work`, called off, has ended
        self._draining = False
        self._keep_cached = False

    def refusal(self, turn: Turn) -> str | None:
        """Why this rank cannot begin `turn` now, or None."""
        wanted = Residency.RESIDENT if turn is Turn.EVICT else Residency.EVICTED
        if self.state is not wanted:
            return f"the draft is {self.state.name}, not {wanted.name}"
        return self._store.intact() if turn is Turn.RELOAD else None

    def make(self, turn: Turn, slots: int = 0, keep_cached: bool = False) -> None:
        """Makes a turn.

        Args:
            slots: of the pool after `Turn.EVICTED`.
            keep_cached: whether `Turn.RELOAD` moves prefixes nobody holds rather than drop them.
        """
        before = self.state
        self._keep_cached = keep_cached
        match turn:
            case Turn.EVICT:
                self._begin_evict()
            case Turn.RELOAD:
                self._begin_reload()
            case Turn.EVICTED:
                self._end_evicted(slots)
            case Turn.RESIDENT:
                self._end_resident()
        logger.info("draft %s -> %s; the KV pool has %d slots", before.name, self.state.name, self.slots)

    def iterate(self) -> None:
        """Once per scheduler iteration, between steps: goes on emptying the tail, lets one chunk be copied."""
        if self._draining:
            self._drain()
        if self._next is not None and (self._work is None or not self._work.running):
            self._begin(*self._next)
        if self._work is not None:
            self._work.pace.give(self._look)

    def outcome(self) -> tuple[Turn, str | None] | None:
        """Once, when the work of the last turn has ended: the turn, and why it failed if it did."""
        work = self._work
        if work is None or work.running or self._next is not None:
            return None
        self._work = None
        self._look()
        self.counters.seconds[self._turn.name.lower()] = work.seconds
        if work.failure is not None:
            self.counters.failures += 1
        return self._turn, work.failure

    def report(self) -> dict[str, Any]:
        """For `/server_info`."""
        counters = self.counters
        return {
            "residency": self.state.name,
            "slots": self.slots,
            "slots_resident": self.sizes.small,
            "slots_evicted": self.sizes.large,
            "slots_weights_only": self.sizes.weights_only,
            "device_bytes": self._ledger.report(),
            "evictions": counters.evictions,
            "reloads": counters.reloads,
            "failures": counters.failures,
            "postponed": counters.postponed,
            "moved_slots": counters.moved_slots,
            "dropped_slots": counters.dropped_slots,
            "copied_bytes": counters.copied,
            "most_copied_bytes": counters.most_copied,
            "seconds": dict(counters.seconds),
        }

    # Turns.

    def _begin_evict(self) -> None:
        assert self.state in (Residency.RESIDENT, Residency.RELOADING), f"EVICT while {self.state.name}"
        if self.state is Residency.RESIDENT:
            self.counters.evictions += 1
        self.state = Residency.EVICTING
        self._draining = False
        self._on_draft_lost()
        self._start(Turn.EVICT, self._leave)

    def _end_evicted(self, slots: int) -> None:
        assert self.state in (Residency.EVICTING, Residency.RELOADING), f"EVICTED while {self.state.name}"
        self.state = Residency.EVICTED
        self._draining = False
        if slots > self.slots:
            self._allocator.grow(slots)
            self._set_capacity(slots)
        elif self._store.resident or self._draft.nbytes or self._work is not None:  # given up halfway
            self._start(Turn.EVICTED, lambda pace: self._give_draft_back())

    def _begin_reload(self) -> None:
        assert self.state in (Residency.EVICTED, Residency.EVICTING), f"RELOAD while {self.state.name}"
        if self.state is Residency.EVICTED:
            self.counters.reloads += 1
        self.state = Residency.RELOADING
        self._look()
        self.counters.most_copied = 0
        if self.slots > self.sizes.small:
            self._draining = True
            self._drain()
        else:
            self._start(Turn.RELOAD, self._come_back)

    def _end_resident(self) -> None:
        assert self.state is Residency.RELOADING and self._store.resident, f"RESIDENT while {self.state.name}"
        self.state = Residency.RESIDENT

    def _drain(self) -> None:
        begin = self._clock()
        done = self._shrink(self.sizes.small, self._keep_cached)
        self.counters.dropped_slots += done.dropped
        if done.short:
            self.counters.postponed += 1
            return
        self._draining = False
        self.counters.moved_slots += done.moved
        self._allocator.shrink(self.sizes.small)
        self._set_capacity(self.sizes.small)
        self.counters.seconds["contract"] = self._clock() - begin
        self._start(Turn.RELOAD, self._come_back)

    def _set_capacity(self, slots: int) -> None:
        self.slots = slots
        self._target.resized(slots)
        self._on_capacity(slots)

    def _look(self) -> None:
        """How many weights were copied since this was last called."""
        counters, copied = self.counters, self._store.copied
        counters.most_copied = max(counters.most_copied, copied - counters.copied)
        counters.copied = copied

    # Work in the background.

    def _start(self, turn: Turn, work: Callable[[Pace], None]) -> None:
        """Starts `work`, or, where other work still runs, calls that off and starts once it has ended."""
        if self._work is not None and self._work.running:
            self._work.pace.cancel()
            self._next = (turn, work)
        else:
            self._begin(turn, work)

    def _begin(self, turn: Turn, work: Callable[[Pace], None]) -> None:
        self._turn, self._next = turn, None
        self._before_work()
        self._work = Background(f"nightjar-{turn.name.lower()}", work, self._clock)

    def _leave(self, pace: Pace) -> None:
        """The draft's memory becomes the target's KV."""
        self._give_draft_back()
        self._resize(self._target, Account.TARGET_KV, self.sizes.large)

    def _come_back(self, pace: Pace) -> None:
        """The target's tail becomes the draft's memory, and its weights are copied into it."""
        self._resize(self._target, Account.TARGET_KV, self.sizes.small)
        self._resize(self._draft, Account.DRAFT_KV, self.sizes.small)
        if not self._store.resident:  # it is where an eviction could not take it away
            self._ledger.charge(Account.DRAFT_WEIGHTS, self._store.nbytes)
        try:
            self._store.reload(self._chunk_bytes, pace.take)
        except BaseException:
            if not self._store.resident:
                self._ledger.release(Account.DRAFT_WEIGHTS, self._store.nbytes)
            raise

    def _give_draft_back(self) -> None:
        if self._store.resident:
            self._store.release()
            self._ledger.release(Account.DRAFT_WEIGHTS, self._store.nbytes)
        self._resize(self._draft, Account.DRAFT_KV, 0)

    def _resize(self, pool: Pool, account: Account, slots: int) -> None:
        """Memory is charged before it is taken, and released after it is given back."""
        change = pool.bytes_for(slots) - pool.nbytes
        if change > 0:
            self._ledger.charge(account, change)
        try:
            pool.resize(slots)
        except CommitError:
            self._ledger.release(account, max(change, 0))
            raise
        if change < 0:
            self._ledger.release(account, -change)
