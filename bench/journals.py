"""What a server's journal tells a benchmark: the draft's moves, and the run over time."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from sglang_nightjar.coordination.messages import Turn

Record = dict[str, Any]
Series = dict[str, list[float | None]]

_BINS, _STEPS_A_BIN = 500, 8
_BEFORE = 100  # decode steps before a move that tell how long a step takes then


def moves(records: Sequence[Record]) -> list[Record]:
    """Every move of the draft, oldest first.

    kind: evict or reload. outcome: done, undone, given up (undoing failed too), or unfinished.
    began_s, seconds: on the server's clock; it began so long after the first step did. phases: s of that; a reload
        drains the tail until what is alive fits the small pool, then returns; an eviction only leaves.
    pause_s: of a reload, how long the pool's contraction stopped everything.
    decode_steps: from the step under the first turn to the step under the last; longest_over_median: the longest of
        them over the median of the 100 before, or None where there are none.
    slots: of the KV pool before and after. moved_slots, dropped_slots: what the contraction did.
    copied_bytes: of weights; most_copied_bytes: of those, the most between two scheduler iterations.
    """
    found: list[Record] = []
    steps = _Steps(records)
    previous: Record | None = None  # the memory's last record
    open_move: _Move | None = None
    number = 0  # of the directive in force
    for record in records:
        if record["record"] == "directive":
            number = record["step"]
        elif record["record"] == "memory":
            turn = Turn(record["turn"])
            if open_move is None and turn.begins:
                open_move = _Move(turn, number, record, previous)
            elif open_move is not None:
                open_move.add(turn, record)
                if open_move.ended:
                    found.append(open_move.tell(number, steps))
                    open_move = None
            previous = record
    if open_move is not None:
        found.append(open_move.tell(number, steps))
    start = _start(records)
    return [{**move, "began_s": move["began_s"] - start} for move in found]


class _Steps:
    """The decode steps, by the directive they were made under: seconds each."""

    def __init__(self, records: Sequence[Record]) -> None:
        made = [record for record in records if record["record"] == "step" and record["batch_size"] > 0]
        self._directives = [record["directive"] for record in made]
        self._seconds = [record["seconds"] for record in made]

    def between(self, first: int, last: int) -> list[float]:
        """Those under directives `first` to `last`."""
        return self._seconds[bisect_left(self._directives, first) : bisect_right(self._directives, last)]

    def before(self, first: int) -> list[float]:
        """The last ones before directive `first`."""
        end = bisect_left(self._directives, first)
        return self._seconds[max(end - _BEFORE, 0) : end]


class _Move:
    """From its first turn to its last. `before`: the memory's record before it, if there is one."""

    def __init__(self, turn: Turn, directive: int, record: Record, before: Record | None) -> None:
        self._turns, self._directive = [turn], directive
        self._first = self._last = record
        # Nothing has been copied at the first turn; a reload may have contracted the pool in it.
        self._before = before or {"slots": record["slots_resident"], "moved_slots": 0, "dropped_slots": 0}
        small = record["slots"] == record["slots_resident"]
        self._contracted_s: float | None = record["now_s"] if turn is Turn.RELOAD and small else None

    def add(self, turn: Turn, record: Record) -> None:
        if turn is Turn.NONE:
            self._contracted_s = record["now_s"]
        else:
            self._turns.append(turn)
        self._last = record

    @property
    def ended(self) -> bool:
        return self._turns[-1] in (Turn.EVICTED, Turn.RESIDENT)

    def tell(self, directive: int, steps: _Steps) -> Record:
        """`directive`: that ended it, or the last one."""
        first, last = self._first, self._last
        seconds = last["now_s"] - first["now_s"]
        during, before = steps.between(self._directive, directive), steps.before(self._directive)
        evicting = self._turns[0] is Turn.EVICT
        if evicting:
            phases = {"leave": seconds}
        elif self._contracted_s is None:
            phases = {"drain": seconds}
        else:
            drained = self._contracted_s - first["now_s"]
            phases = {"drain": drained, "return": seconds - drained}
        return {
            "kind": "evict" if evicting else "reload",
            "outcome": self._outcome(),
            "began_s": first["now_s"],
            "seconds": seconds,
            "phases": phases,
            "pause_s": None if self._contracted_s is None else last["seconds"]["contract"],
            "decode_steps": len(during),
            "longest_over_median": max(during) / statistics.median(before) if during and before else None,
            "slots": [self._before["slots"], last["slots"]],
            "moved_slots": last["moved_slots"] - self._before["moved_slots"],
            "dropped_slots": last["dropped_slots"] - self._before["dropped_slots"],
            "copied_bytes": last["copied_bytes"] - first["copied_bytes"],
            "most_copied_bytes": 0 if evicting and Turn.RELOAD not in self._turns else last["most_copied_bytes"],
        }

    def _outcome(self) -> str:
        if not self.ended:
            return "unfinished"
        if len(self._turns) == 2:
            return "done"
        gave_up = self._turns[-1] is Turn.EVICTED and self._last["slots"] == self._last["slots_resident"]
        return "given up" if gave_up else "undone"


def series(records: Sequence[Record], bins: int = _BINS) -> Series:
    """A run over time, in at most `bins` equal spans of the server's clock; empty where no step was made.

    time_s: end of a span, from the start of the first step. arrivals_per_s, tokens_per_s (committed by decode steps).
    batch, waiting: most requests running and waiting; 0 in a span without decode steps. gamma: mean over the decode
    steps, None without any. slots, used: of the KV pool, at the span's last decode step (the one before, without any).
    retracted: requests that lost their slots in the span. A step counts in the span that its middle lies in.
    """
    steps = [record for record in records if record["record"] == "step"]
    if not steps:
        return {}
    began = _start(steps)
    count = max(1, min(bins, len(steps) // _STEPS_A_BIN))
    width = (steps[-1]["now_s"] - began) / count
    spans: list[list[Record]] = [[] for _ in range(count)]
    for step in steps:
        middle = step["now_s"] - step["seconds"] / 2 - began
        spans[min(int(middle / width), count - 1)].append(step)
    told: Series = {name: [] for name in ("time_s", "arrivals_per_s", "tokens_per_s", "batch", "waiting", "gamma",
                                          "slots", "used", "retracted")}  # fmt: skip
    last, slots, used = steps[0], None, None
    for index, span in enumerate(spans):
        decodes = [step for step in span if step["batch_size"] > 0]
        if decodes:
            slots = decodes[-1]["total_slots"]
            used = slots - decodes[-1]["free_slots"]
        end = span[-1] if span else last
        values = {
            "time_s": (index + 1) * width,
            "arrivals_per_s": (end["arrived"] - last["arrived"]) / width,
            "tokens_per_s": sum(map(committed, decodes)) / width,
            "batch": max((step["batch_size"] for step in decodes), default=0),
            "waiting": max((step["queue_length"] for step in decodes), default=0),
            "gamma": statistics.fmean(step["gamma"] for step in decodes) if decodes else None,
            "slots": slots,
            "used": used,
            "retracted": end["retracted"] - last["retracted"],
        }
        for name, value in values.items():
            told[name].append(value)
        last = end
    return told


def _start(records: Sequence[Record]) -> float:
    """When the first step began; 0 where there was none."""
    for record in records:
        if record["record"] == "step":
            return float(record["now_s"] - record["seconds"])
    return 0.0


def committed(step: Record) -> int:
    """Tokens that a step of the journal committed."""
    tokens: int = step["cut_tokens"]
    for index, requests in enumerate(step["committed"]):
        tokens += (index + 1) * requests
    return tokens
