"""What a server's journal tells a benchmark."""

import statistics
from collections.abc import Sequence
from typing import Any

from sglang_nightjar.coordination.messages import Turn


def timeline(records: Sequence[dict[str, Any]]) -> list[list[float]]:
    """[time s, batch size, gamma, KV slots, residency] of the decisions in a server's journal, thinned to about 500,
    the largest batch among them."""
    points: list[list[float]] = []
    state = None
    for record in records:
        if record["record"] == "state":
            state = record
        elif record["record"] == "directive" and state is not None:
            points.append(
                [state["now_s"], state["batch_size"], record["gamma"], state["total_slots"], state["residency"]]
            )
    step = max(1, len(points) // 500)
    largest = max(range(len(points)), key=lambda index: points[index][1], default=0)
    return [point for index, point in enumerate(points) if index % step == 0 or index == largest]


def moves(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the draft's moves did to decoding: decode steps in between, the longest of them over the median of all."""
    every: list[float] = []
    during: dict[int, list[float]] = {Turn.EVICT: [], Turn.RELOAD: []}
    turn = Turn.NONE
    for record in records:
        if record["record"] == "directive" and record["turn"] != Turn.NONE:
            turn = Turn(record["turn"])
        elif record["record"] == "step" and record["batch_size"] > 0:
            every.append(record["seconds"])
            if turn in during:
                during[turn].append(record["seconds"])
    return {
        Turn(turn).name.lower(): {"steps": len(steps), "longest_over_median": max(steps) / statistics.median(every)}
        for turn, steps in during.items()
        if steps
    }
