"""Suites that can be stopped and taken up again."""

import math
from pathlib import Path
from typing import Any

import pytest

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate import kept as module
from sglang_nightjar.simulate.jobs import run_all
from sglang_nightjar.simulate.kept import Kept
from sglang_nightjar.simulate.metrics import Spread

calls: list[int] = []


def spread(number: int) -> Spread:
    calls.append(number)
    return Spread(number / 3, float("nan"), 1e300)


def breaks_at_two(number: int) -> dict[str, Any]:
    calls.append(number)
    if number == 2:
        raise ValueError("two")
    return {"number": number}


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def test_runs_once(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    first = run_all(spread, [(1,), (2,)], 1, "", Kept(path, Spread))
    again = run_all(spread, [(3,), (2,), (1,)], 1, "", Kept(path, Spread))
    assert calls == [1, 2, 3]
    assert [result.mean for result in again] == [1.0, first[1].mean, first[0].mean]
    assert all(isinstance(result, Spread) and math.isnan(result.p50) for result in again)


def test_what_was_finished_before_an_error_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with pytest.raises(ValueError, match="two"):
        run_all(breaks_at_two, [(0,), (1,), (2,)], 1, "", Kept(path, dict))
    assert Kept(path, dict).find(breaks_at_two, (1,)) == {"number": 1}
    assert Kept(path, dict).find(breaks_at_two, (2,)) is None


def test_other_code_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    run_all(spread, [(1,)], 1, "", Kept(path, Spread))
    monkeypatch.setattr(module, "_code", lambda: "changed")
    assert Kept(path, Spread).find(spread, (1,)) is None


def test_a_cut_off_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    run_all(spread, [(1,), (2,)], 1, "", Kept(path, Spread))
    path.write_text(path.read_text()[:-5])
    kept = Kept(path, Spread)
    assert kept.find(spread, (1,)) is not None
    assert kept.find(spread, (2,)) is None
    run_all(spread, [(2,)], 1, "", kept)
    assert Kept(path, Spread).find(spread, (2,)) is not None


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a run\n")
    with pytest.raises(UserError, match="line 1, is not a kept run"):
        Kept(path, dict)
    with pytest.raises(UserError, match="cannot use"):
        Kept(tmp_path / "missing" / "runs.jsonl", dict)
