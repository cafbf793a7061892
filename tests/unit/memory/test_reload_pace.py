"""Weights of a real store come back a chunk at a time, however long a chunk takes: counted, not timed."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from arena_kinds import Kind, Place
from fake_rank import Rank

from sglang_nightjar.coordination.messages import Turn
from sglang_nightjar.memory.draft_store import DraftStore
from sglang_nightjar.memory.ledger import Account

CHUNK = 1000  # bytes; the weights are several, and the last is shorter


class Reads:
    """Reads of the mirror, each of at most `most` bytes, and only as many as are let through."""

    def __init__(self, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[int] = []
        self._through = threading.Semaphore(0)
        real: Callable[..., int] = os.preadv

        def slow(file: int, buffers: Sequence[Any], offset: int) -> int:
            assert self._through.acquire(timeout=30), "nobody lets this read through"
            count = real(file, [buffer[:most] for buffer in buffers], offset)
            self.done.append(count)
            return count

        monkeypatch.setattr(os, "preadv", slow)

    def let(self, count: int) -> None:
        """Lets reads through."""
        self._through.release(count)

    def wait(self, total: int) -> None:
        """Until there have been so many."""
        deadline = time.monotonic() + 10
        while len(self.done) < total:
            assert time.monotonic() < deadline, f"{len(self.done)} reads, not {total}"
            time.sleep(0.001)
        time.sleep(0.02)  # for one more, if it can be made
        assert len(self.done) == total


def with_store(place: Place) -> tuple[Rank, DraftStore]:
    """A rank whose store is a real one."""
    rank = Rank(Kind("posix"))
    model = torch.nn.Linear(125, 10, bias=False)
    store = DraftStore(model, place.memory, shared_with=torch.nn.Module())
    rank.ledger.release(Account.DRAFT_WEIGHTS, rank.store.nbytes)
    rank.ledger.charge(Account.DRAFT_WEIGHTS, store.nbytes)
    rank.memory._store, rank.memory._chunk_bytes = store, CHUNK
    rank.memory._before_work = place.memory.mark
    return rank, store


def test_a_chunk_that_outlives_an_iteration_is_not_joined_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, store = with_store(Kind("posix").place(None))
    rank.evict()
    reads = Reads(CHUNK // 2, monkeypatch)
    rank.memory.make(Turn.RELOAD)
    reads.let(1)
    rank.memory.iterate()
    reads.wait(1)  # the first chunk is half done
    for _ in range(3):
        rank.memory.iterate()
    reads.let(3)
    reads.wait(2)  # it is done; what was iterated meanwhile permits nothing
    rank.memory.iterate()
    reads.wait(4)
    assert store.copied == 2 * CHUNK
    reads.let(100)
    assert rank.finish() is None
    report = rank.memory.report()
    assert report["copied_bytes"] == store.copied == sum(reads.done) == store.nbytes > 3 * CHUNK
    assert report["most_copied_bytes"] == CHUNK
    rank.memory.make(Turn.RESIDENT)
    store.verify()


def test_bytes_between_two_iterations_never_exceed_a_chunk(place: Place) -> None:
    """At whatever pace this machine's threads have."""
    rank, store = with_store(place)
    for cycle in range(1, 51):
        rank.evict()
        rank.reload()
        report = rank.memory.report()
        assert report["copied_bytes"] == store.copied == cycle * store.nbytes
        assert 0 < report["most_copied_bytes"] <= CHUNK
