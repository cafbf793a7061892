"""What `bench/overhead.py` reads out of its servers' rows."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCH = str(Path(__file__).resolve().parents[2] / "bench")
OWNERS = ["rest", "device", "lockstep.decide", "worker", "meter"]
BATCH = 4


@pytest.fixture
def report() -> Iterator[ModuleType]:
    path = list(sys.path)
    sys.path.append(BENCH)
    import overhead_report

    yield overhead_report
    sys.path[:] = path


def make_rows(steps: list[dict[str, Any]]) -> Any:
    """Rows as a scheduler writes them, sums since the start. Of each iteration: `size`, `prefill`, `gamma`, `cpu` and
    `spent` in us, and metered calls of `entered` and `made`, each by owner."""
    rows, cpu = [], 0
    sums = np.zeros((3, len(OWNERS)), np.int64)
    for step in ({}, *steps):
        cpu += 1000 * step.get("cpu", 0)
        sums[0] += 1000 * np.array(step.get("spent", [0] * len(OWNERS)))
        sums[1] += step.get("entered", [0] * len(OWNERS))
        sums[2] += step.get("made", [0] * len(OWNERS))
        rows.append([step.get("size", 0), step.get("prefill", 0), step.get("gamma", 0), cpu, *sums.flatten()])
    return np.array(rows)


def step(size: int = BATCH, *, own: int = 30, rest: int = 500, cpu: int = 600, **facts: int) -> dict[str, Any]:
    """Two thirds of `own` are the worker's."""
    return {"size": size, "cpu": cpu, "spent": [rest, 20_000, own // 3, own - own // 3, 9], **facts}


def layout(inside_ns: float = 0.0, outside_ns: float = 0.0) -> Any:
    from metered_launch import Layout

    return Layout(OWNERS, inside_ns, outside_ns)


def test_only_steps_of_the_full_batch_count(report: ModuleType) -> None:
    """Such a step that follows another: not the first one, no prefill, not while requests are leaving."""
    iterations = [step(prefill=1), step(own=90), step(), step(own=60), step(3), step(own=120), step(), step(0)]
    found = report.full_steps(make_rows(iterations), layout(), BATCH, speculating=False)
    assert found.nightjar == [30, 60, 30]
    assert found.own == {"lockstep.decide": [10, 20, 10], "worker": [20, 40, 20]}
    assert (found.rest, found.device, found.cpu) == ([500] * 3, [20_000] * 3, [600] * 3)


def test_gammas_are_kept_apart(report: ModuleType) -> None:
    rows = make_rows([step(), step(), step(own=60, gamma=2), step(own=60, gamma=3), step()])
    assert report.full_steps(rows, layout(), BATCH, speculating=False).nightjar == [30]
    assert report.full_steps(rows, layout(), BATCH, speculating=True).nightjar == [60]


def test_what_metering_took_is_taken_off(report: ModuleType) -> None:
    """Three calls from SGLang's code, two of them to the worker; 1 us inside and 2 us outside each."""
    metered = {**step(), "entered": [0, 0, 1, 2, 0], "made": [3, 0, 0, 0, 0]}
    found = report.full_steps(make_rows([step(), metered]), layout(1000, 2000), BATCH, speculating=False)
    assert found.own == {"lockstep.decide": [9], "worker": [18]}
    assert found.rest == [494] and found.cpu == [591]


def test_figures(report: ModuleType) -> None:
    def turns(*owns: int, cpu: int) -> list[Any]:
        return [
            report.full_steps(make_rows([step(own=own, cpu=cpu)] * 4), layout(), BATCH, speculating=False)
            for own in owns
        ]

    plain = turns(0, 0, cpu=500)
    found = report.figures(turns(30, 60, cpu=700), plain)
    assert found["steps"] == 6 and found["nightjar_us"]["median"] == 45 and found["nightjar_us"]["mean"] == 45
    assert found["of_plain_step"] == pytest.approx(45 / 20_500) and found["of_plain_scheduler"] == 45 / 500
    assert found["more_cpu_us"] == [200, 200] and found["more_cpu_of_plain_step"] == pytest.approx(200 / 20_500)
    assert set(found["by_owner_us"]) == {"lockstep.decide", "worker"}
    with pytest.raises(SystemExit, match="no step of a full batch"):
        report.figures([report.full_steps(make_rows([step(3)] * 3), layout(), BATCH, speculating=False)], plain)


def test_table(report: ModuleType) -> None:
    def server(own: int, cpu: int) -> Any:
        rows = make_rows([step(own=own, cpu=cpu)] * 4)
        return report.full_steps(rows, layout(), BATCH, speculating=False)

    plain, own = [server(0, 500)] * 2, [server(410, 700)] * 2
    result = {
        "machine": {"cpu": "a CPU", "cores": 2, "load": 0.5, "date": "2026-01-01", "commit": "abc"},
        "options": {"batch": str(BATCH), "set_up": "a set-up"},
        "servers": {"plain": report.figures(plain, plain), "gamma 0": report.figures(own, plain)},
        "set_ups": {"another": 40_500.0},
    }
    lines = report.table(result).splitlines()
    assert "20.50 ms, 0.50 of them the scheduler" in lines[1] and "at most 2%" in lines[1]
    assert any(line.startswith("| gamma 0 | 6 | 410 | 410 | 410 | 2.00% | 82.0% | 200 |") for line in lines)
    assert "| another | 41.00 | 1.00% |" in lines, "410 us of a step of 41 ms"
