"""The state machine of one rank: every arrow, every fault, the ledger exact after each."""

import threading
import time
from collections.abc import Iterator

import pytest
from arena_kinds import Kind
from fake_rank import CHUNKS, LARGE, SMALL, Rank

from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.memory.arena import CommitError
from sglang_nightjar.memory.background import Background, Pace
from sglang_nightjar.policy.base import Residency


@pytest.fixture
def rank(kind: Kind) -> Iterator[Rank]:
    made = Rank(kind)
    yield made
    made.place.end()


def test_there_and_back(rank: Rank) -> None:
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


def test_the_tail_drains_before_anything_else(rank: Rank) -> None:
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


def test_one_chunk_per_iteration(rank: Rank) -> None:
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


def test_growing_fails_and_is_undone(rank: Rank) -> None:
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
def test_reload_fails_and_is_undone(rank: Rank, fault: BaseException) -> None:
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


def test_reload_is_called_off_while_the_tail_drains(rank: Rank) -> None:
    rank.evict()
    rank.in_the_way = 10**6
    rank.memory.make(Turn.RELOAD)
    rank.memory.make(Turn.EVICT)
    assert rank.finish() is None
    rank.memory.make(Turn.EVICTED, LARGE)
    assert rank.capacity == LARGE
    rank.check()


def test_reload_is_called_off_between_chunks(rank: Rank) -> None:
    rank.evict()
    rank.memory.make(Turn.RELOAD)
    rank.memory.make(Turn.EVICT)  # another rank has failed; here the thread waits for its first permission
    assert rank.store.copied <= 100 and rank.finish() is None
    rank.memory.make(Turn.EVICTED, LARGE)
    rank.check()


def test_given_up_with_the_small_pool(rank: Rank) -> None:
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


def test_a_broken_mirror_refuses_a_reload(rank: Rank) -> None:
    rank.evict()
    rank.store.broken = "the mirror is gone"
    assert rank.memory.refusal(Turn.RELOAD) == "the mirror is gone"


def test_work_that_is_called_off_delays_what_follows_and_nobody_else(rank: Rank) -> None:
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
    running.pace.give(lambda: None)
    running.pace.cancel()
    deadline = time.monotonic() + 10
    while running.running and time.monotonic() < deadline:
        time.sleep(0.001)
    assert running.failure == "cancelled"
