"""What `bench/journals.py` and `bench/timeline.py` read off a journal, from records with known answers."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_nightjar.coordination.messages import Turn

BENCH = str(Path(__file__).resolve().parents[2] / "bench")
SMALL, LARGE = 100, 160


@pytest.fixture
def bench() -> Iterator[tuple[ModuleType, ModuleType]]:
    path = list(sys.path)
    sys.path.append(BENCH)
    import journals
    import timeline

    yield journals, timeline
    sys.path[:] = path


class Server:
    """Writes what a server with a draft would; every step takes 0.1 s and decodes 2 requests at gamma 1."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.now_s, self.directive, self.slots, self.copied, self.most, self.arrived = 1000.0, 0, SMALL, 0, 0, 0

    def direct(self, turn: Turn = Turn.NONE) -> None:
        self.directive += 1
        self.records.append({"record": "directive", "step": self.directive, "turn": turn})
        if turn is not Turn.NONE:
            self.remember(turn)

    def remember(self, turn: Turn) -> None:
        self.records.append(
            {"record": "memory", "now_s": self.now_s, "turn": turn, "slots": self.slots, "slots_resident": SMALL,
             "moved_slots": 0 if self.slots == LARGE else 7, "dropped_slots": 3, "copied_bytes": self.copied,
             "most_copied_bytes": self.most, "seconds": {"contract": 0.002}}
        )  # fmt: skip

    def steps(self, count: int, seconds: float = 0.1, **more: Any) -> None:
        for _ in range(count):
            self.direct()
            self.now_s += seconds
            seen = {"batch_size": 2, "gamma": 1, "committed": [1, 1], "cut_tokens": 0, "queue_length": 0}
            seen |= {"retracted": 0, "total_slots": self.slots, "free_slots": self.slots - 40}
            self.records.append(
                {
                    "record": "step",
                    "directive": self.directive,
                    "now_s": self.now_s,
                    "seconds": seconds,
                    "arrived": self.arrived,
                    **seen,
                    **more,
                }
            )

    def evict(self) -> None:
        self.direct(Turn.EVICT)
        self.steps(3)
        self.slots = LARGE
        self.direct(Turn.EVICTED)


def test_moves(bench: tuple[ModuleType, ModuleType]) -> None:
    server = Server()
    server.steps(20)
    server.evict()
    server.steps(10)
    server.direct(Turn.RELOAD)
    server.steps(2)
    server.slots = SMALL
    server.remember(Turn.NONE)
    server.steps(1, 0.25)  # the contraction is in it
    server.steps(3)
    server.copied, server.most = 500, 200
    server.direct(Turn.RESIDENT)
    server.steps(1)
    evicted, reloaded = bench[0].moves(server.records)
    assert evicted == {
        "kind": "evict", "outcome": "done", "began_s": pytest.approx(2.0), "seconds": pytest.approx(0.3),
        "phases": {"leave": pytest.approx(0.3)}, "pause_s": None, "decode_steps": 3,
        "longest_over_median": pytest.approx(1.0), "slots": [SMALL, LARGE], "moved_slots": 0, "dropped_slots": 3,
        "copied_bytes": 0, "most_copied_bytes": 0,
    }  # fmt: skip
    assert reloaded == {
        "kind": "reload", "outcome": "done", "began_s": pytest.approx(3.3), "seconds": pytest.approx(0.75),
        "phases": {"drain": pytest.approx(0.2), "return": pytest.approx(0.55)}, "pause_s": 0.002, "decode_steps": 6,
        "longest_over_median": pytest.approx(2.5), "slots": [LARGE, SMALL], "moved_slots": 7, "dropped_slots": 0,
        "copied_bytes": 500, "most_copied_bytes": 200,
    }  # fmt: skip


def test_a_move_that_fails(bench: tuple[ModuleType, ModuleType]) -> None:
    server = Server()
    server.steps(8)
    for turns, slots in (
        ((Turn.EVICT, Turn.RELOAD, Turn.RESIDENT), SMALL),
        ((Turn.EVICT, Turn.RELOAD, Turn.EVICTED), SMALL),
        ((Turn.RELOAD, Turn.EVICT, Turn.EVICTED), LARGE),
        ((Turn.RELOAD, Turn.EVICT, Turn.EVICTED), SMALL),
        ((Turn.RELOAD,), LARGE),
    ):
        for turn in turns[:-1]:
            server.direct(turn)
            server.steps(1)
        server.slots = slots
        server.direct(turns[-1])
    made = bench[0].moves(server.records)
    assert [(move["kind"], move["outcome"]) for move in made] == [
        ("evict", "undone"),
        ("evict", "given up"),
        ("reload", "undone"),
        ("reload", "given up"),
        ("reload", "unfinished"),
    ]
    assert "| reload (given up) |" in bench[1].moves_table({"s": made}) and not bench[1].moves_table({"s": []})
    names = [residency for _, _, residency in bench[1].residencies(made, 9.0)]
    assert names == ["leaving", "leaving", *["evicted", "returning"] * 3, "evicted"]


def test_series(bench: tuple[ModuleType, ModuleType]) -> None:
    server = Server()
    server.steps(16)
    server.arrived = 4
    server.steps(8, gamma=0, committed=[2], batch_size=5, retracted=1)
    server.slots = LARGE
    server.steps(8, retracted=1, queue_length=3)
    run = bench[0].series(server.records)
    assert run["time_s"] == pytest.approx([0.8, 1.6, 2.4, 3.2])
    assert run["arrivals_per_s"] == pytest.approx([0, 0, 4 / 0.8, 0]) and run["retracted"] == [0, 0, 1, 0]
    assert run["tokens_per_s"] == pytest.approx([30, 30, 20, 30])
    assert (run["batch"], run["waiting"], run["gamma"]) == ([2, 2, 5, 2], [0, 0, 0, 3], [1, 1, 0, 1])
    assert run["slots"] == [SMALL, SMALL, SMALL, LARGE] and run["used"] == [40] * 4


def test_a_span_without_steps(bench: tuple[ModuleType, ModuleType]) -> None:
    server = Server()
    server.steps(8)
    server.now_s += 10.0
    server.steps(16)
    run = bench[0].series(server.records)
    assert run["gamma"][1] is None and run["batch"][1] == 0 and run["slots"][1] == SMALL and run["tokens_per_s"][1] == 0
    assert bench[0].series([]) == {} and bench[0].moves([]) == []
