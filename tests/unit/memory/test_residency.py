"""The state machine of one rank: every arrow, every fault, the ledger exact after each."""

import threading
import time
from collections.abc import Callable

import pytest

from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.background import Background, Pace
from sglang_nightjar.memory.ledger import Account, Ledger
from sglang_nightjar.memory.relocate import Contraction
from sglang_nightjar.memory.residency import DraftResidency, PoolSizes
from sglang_nightjar.policy.base import Residency

SMALL, LARGE = 100, 160
SLOT, WEIGHTS, CHUNKS = 10, 400, 4
SIZES = PoolSizes(SMALL, LARGE)


class FakePool:
    def __init__(self, slots: int) -> None:
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

    def __init__(self) -> None:
        self.resident = True
        self.fault: BaseException | None = None
        self.broken: str | None = None
        self.copied = 0
        self.stuck: threading.Event | None = None

    def release(self) -> None:
        assert self.resident
        self.resident = False

    def reload(self, chunk_bytes: int, before_chunk: Callable[[], None]) -> None:
        if self.stuck is not None:
            self.stuck.wait(10)
        for _ in range(CHUNKS):
            before_chunk()
            if self.fault is not None:
                raise self.fault
            self.copied += chunk_bytes
        self.resident = True

    def intact(self) -> str | None:
        return self.broken


class Rank:
    def __init__(self) -> None:
        self.store, self.target, self.draft, self.allocator = (
            FakeStore(),
            FakePool(SMALL),
            FakePool(SMALL),
            FakeAllocator(),
        )
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


def test_there_and_back() -> None:
    rank = Rank()
    assert rank.memory.refusal(Turn.RELOAD) == "the draft is RESIDENT, not EVICTED"
    rank.memory.make(Turn.EVICT)
    assert rank.memory.state is Residency.EVICTING and rank.lost == 1
    assert rank.finish() is None
    assert rank.capacity == SMALL, "the pool grows at a step, not when the memory is there"
    rank.memory.make(Turn.EVICTED, LARGE)
    assert rank.memory.state is Residency.EVICTED and rank.capacity == LARGE and rank.allocator.size == LARGE
    rank.check()
    assert rank.memory.refusal(Turn.RELOAD) is None
    rank.memory.make(Turn.RELOAD, keep_cached=True)
    assert rank.memory.state is Residency.RELOADING and rank.capacity == SMALL and rank.kept == [True]
    assert rank.finish() is None
    rank.memory.make(Turn.RESIDENT)
    assert rank.memory.state is Residency.RESIDENT
    rank.check()
    report = rank.memory.report()
    assert (report["evictions"], report["reloads"], report["moved_slots"], report["dropped_slots"]) == (1, 1, 5, 2)
    assert set(report["seconds"]) == {"evict", "contract", "reload"}


def test_the_tail_drains_before_anything_else() -> None:
    rank = Rank()
    rank.evict()
    rank.in_the_way = 3
    rank.memory.make(Turn.RELOAD)
    assert rank.capacity == LARGE
    for _ in range(2):
        rank.memory.iterate()
        assert rank.capacity == LARGE and rank.memory.outcome() is None
    rank.memory.iterate()
    assert rank.capacity == SMALL
    assert rank.finish() is None and rank.memory.report()["postponed"] == 3
    rank.memory.make(Turn.RESIDENT)
    rank.check()


def test_one_chunk_per_iteration() -> None:
    rank = Rank()
    rank.evict()
    rank.memory.make(Turn.RELOAD)
    for done in range(CHUNKS):
        time.sleep(0.02)
        assert rank.store.copied == done * 100, "nothing is copied between iterations beyond one chunk"
        rank.memory.iterate()
        deadline = time.monotonic() + 5
        while rank.store.copied == done * 100 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert rank.store.copied == CHUNKS * 100
    assert rank.finish() is None


def test_growing_fails_and_is_undone() -> None:
    rank = Rank()
    rank.target.full = True
    rank.memory.make(Turn.EVICT)
    assert rank.finish() == "no memory for the pool"
    rank.check()
    rank.memory.make(Turn.RELOAD)
    assert rank.memory.state is Residency.RELOADING and rank.finish() is None
    rank.memory.make(Turn.RESIDENT)
    assert rank.capacity == SMALL and rank.memory.report()["failures"] == 1
    rank.check()


@pytest.mark.parametrize("fault", [CommitError("no memory"), OSError("disk"), SystemExit(), ZeroDivisionError()])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_reload_fails_and_is_undone(fault: BaseException) -> None:
    rank = Rank()
    rank.evict()
    rank.store.fault = fault
    rank.memory.make(Turn.RELOAD)
    failure = rank.finish()
    assert failure == (str(fault) if isinstance(fault, CommitError | OSError) else "the thread died")
    rank.check()
    rank.memory.make(Turn.EVICT)
    assert rank.memory.state is Residency.EVICTING and rank.finish() is None
    rank.memory.make(Turn.EVICTED, LARGE)
    assert rank.capacity == LARGE
    rank.check()
    rank.store.fault = None
    rank.reload()
    rank.check()


def test_reload_is_called_off_while_the_tail_drains() -> None:
    rank = Rank()
    rank.evict()
    rank.in_the_way = 10**6
    rank.memory.make(Turn.RELOAD)
    rank.memory.make(Turn.EVICT)
    assert rank.finish() is None
    rank.memory.make(Turn.EVICTED, LARGE)
    assert rank.capacity == LARGE
    rank.check()


def test_reload_is_called_off_between_chunks() -> None:
    rank = Rank()
    rank.evict()
    rank.memory.make(Turn.RELOAD)
    rank.memory.make(Turn.EVICT)  # another rank has failed; here the thread waits for its first permission
    assert rank.store.copied <= 100 and rank.finish() is None
    rank.memory.make(Turn.EVICTED, LARGE)
    rank.check()


def test_given_up_with_the_small_pool() -> None:
    rank = Rank()
    rank.target.full = True
    rank.memory.make(Turn.EVICT)
    rank.finish()
    rank.store.fault = CommitError("not for the draft either")
    rank.memory.make(Turn.RELOAD)
    rank.finish()
    rank.memory.make(Turn.EVICTED, SMALL)
    assert rank.memory.state is Residency.EVICTED and rank.capacity == SMALL and not rank.store.resident
    assert rank.finish() is None, "what was taken for the draft is given back"
    assert rank.draft.slots == 0
    rank.check()
    rank.store.fault = None
    rank.reload()
    rank.check()


def test_a_broken_mirror_refuses_a_reload() -> None:
    rank = Rank()
    rank.evict()
    rank.store.broken = "the mirror is gone"
    assert rank.memory.refusal(Turn.RELOAD) == "the mirror is gone"


def test_work_that_is_called_off_delays_what_follows_and_nobody_else() -> None:
    rank = Rank()
    rank.evict()
    hold = threading.Event()
    rank.store.stuck = hold
    rank.memory.make(Turn.RELOAD)
    rank.memory.make(Turn.EVICT)  # the thread is in the middle of a chunk, and is not waited for
    for _ in range(20):
        rank.memory.iterate()
        assert rank.memory.outcome() is None
    hold.set()
    assert rank.finish() is None
    rank.memory.make(Turn.EVICTED, LARGE)
    rank.check()


def test_cancelled_work_says_so() -> None:
    def work(pace: Pace) -> None:
        while True:
            pace.take()

    running = Background("test", work)
    running.pace.give()
    running.pace.cancel()
    deadline = time.monotonic() + 10
    while running.running and time.monotonic() < deadline:
        time.sleep(0.001)
    assert running.failure == "cancelled"
