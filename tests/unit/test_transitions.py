"""Rank 0's turns, with ranks that refuse, fail, fall silent and fail again while undoing."""

import pytest

from sglang_nightjar.coordination.coordinator import Coordinator, Phase
from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.coordination.transitions import NextTurn, Transitions
from sglang_nightjar.coordination.transport import NoTransport

SMALL, LARGE = 100, 180


class Bench:
    """A server with one rank, whose work ends as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.coordinator = Coordinator(NoTransport(), 1, lambda: self.now, work_timeout_s=60.0)
        self.transitions = Transitions(self.coordinator, slots_small=SMALL, slots_large=LARGE)

    def begin(self, turn: Turn, epoch: int) -> None:
        assert self.transitions.want(turn, 1, None) and self.transitions.due
        assert self.transitions.next_turn() == NextTurn(turn, epoch)
        assert not self.transitions.due and self.transitions.next_turn() is None

    def end(self, reason: str | None = None) -> None:
        self.coordinator.done(0, self.coordinator.epoch, reason)


def test_there_and_back() -> None:
    bench = Bench()
    bench.begin(Turn.EVICT, 1)
    bench.end()
    assert bench.transitions.next_turn() == NextTurn(Turn.EVICTED, 1, LARGE)
    bench.begin(Turn.RELOAD, 2)
    bench.end()
    assert bench.transitions.next_turn() == NextTurn(Turn.RESIDENT, 2)
    assert (bench.transitions.completed, bench.transitions.undone) == (2, 0)
    assert not bench.transitions.in_progress


def test_one_at_a_time() -> None:
    bench = Bench()
    bench.begin(Turn.EVICT, 1)
    assert not bench.transitions.want(Turn.RELOAD, 2, None)


def test_a_refusal_begins_nothing() -> None:
    bench = Bench()
    assert bench.transitions.want(Turn.RELOAD, 1, "the draft is RESIDENT, not EVICTED")
    assert bench.transitions.next_turn() is None and not bench.transitions.in_progress
    assert bench.coordinator.events.aborted == 1
    bench.begin(Turn.EVICT, 2)


@pytest.mark.parametrize(
    ("wanted", "back", "after"),
    [
        (Turn.EVICT, Turn.RELOAD, NextTurn(Turn.RESIDENT, 2)),
        (Turn.RELOAD, Turn.EVICT, NextTurn(Turn.EVICTED, 2, LARGE)),
    ],
)
def test_a_failure_is_undone(wanted: Turn, back: Turn, after: NextTurn) -> None:
    bench = Bench()
    bench.begin(wanted, 1)
    bench.end("no memory for 4096 bytes")
    assert bench.transitions.due and bench.transitions.next_turn() == NextTurn(back, 2)
    bench.end()
    assert bench.transitions.next_turn() == after
    assert (bench.transitions.completed, bench.transitions.undone) == (0, 1)


def test_where_undoing_fails_too_the_draft_stays_away_and_the_pool_small() -> None:
    bench = Bench()
    bench.begin(Turn.EVICT, 1)
    bench.end("no memory")
    assert bench.transitions.next_turn() == NextTurn(Turn.RELOAD, 2)
    bench.end("no memory for that either")
    assert bench.transitions.next_turn() == NextTurn(Turn.EVICTED, 2, SMALL)
    assert not bench.transitions.in_progress and bench.transitions.undone == 1


def test_a_silent_rank_fails_the_transition() -> None:
    bench = Bench()
    bench.begin(Turn.RELOAD, 1)
    bench.now = 61.0
    bench.coordinator.poll()
    assert bench.coordinator.phase is Phase.FAILED and bench.coordinator.events.timed_out == 1
    assert bench.transitions.next_turn() == NextTurn(Turn.EVICT, 2)
    bench.coordinator.done(0, 1, None)  # it was only late: of another epoch now
    assert bench.coordinator.phase is Phase.WORKING and bench.coordinator.events.stale == 1
