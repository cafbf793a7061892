"""The two suites run to their end in their quick form and judge as they should."""

from typing import Any

import pytest

from sglang_nightjar.simulate import suite_paper, suite_regret
from sglang_nightjar.simulate.table import bars, markdown, met, table


def test_the_paper_suite(capsys: pytest.CaptureFixture[str]) -> None:
    figures = suite_paper.run_suite(["off", "no-draft", "static:1", "static:3"], quick=True)
    assert {row["policy"] for row in figures["closed"]} == {"off", "no-draft", "static:1", "static:3"}
    assert {row["load"] for row in figures["dynamic"]} == {"ramp", "bursts", "onoff", "synthetic"}
    judged: dict[Any, Any] = {bar["name"]: bar for bar in figures["bars"]}
    # `off` is judged here: it loses to speculation for one client and equals itself.
    assert not judged["4090-r1-qwen-7b (a) 1 clients: / best static"]["met"]
    assert judged["4090-r1-qwen-7b (a) 256 clients: / best static"]["met"]
    assert judged["4090-r1-qwen-7b (a) mean: / off"]["value"] == pytest.approx(1.0)
    printed = capsys.readouterr().out
    assert "NOT MET" in printed and "(c) changing load" in printed


def test_the_regret_suite(capsys: pytest.CaptureFixture[str]) -> None:
    figures = suite_regret.run_suite(["static:5", "off"], quick=True)
    assert len(figures["stationary"]) == len(suite_regret.STATIONARY) * 2 * 2
    by_world = {(entry["world"], entry["policy"]): entry for entry in figures["summary"]}
    assert by_world["4090, B 192", "off"]["excess"] == pytest.approx(0.0, abs=1e-9)
    assert by_world["4090, B 192", "static:5"]["excess"] > 0.5
    assert by_world["4090, B 16", "off"]["slope"] == pytest.approx(1.0, abs=0.01)
    assert "After an abrupt change" in capsys.readouterr().out


def test_the_crossover_is_where_the_best_gammas_change() -> None:
    clients = suite_paper.crossover("4090-r1-qwen-7b")
    assert clients is not None and 16 < clients < 256
    # The A100's pool is full before its compute is.
    assert suite_paper.crossover("a100-vicuna-13b") is None


def test_tables() -> None:
    text = table(("name", "x"), [("a", 1.5), ("bb", float("nan"))]).splitlines()
    assert text[0] == "name    x" and text[2] == "a     1.5" and text[3] == "bb      -"
    written = markdown(("name", "x"), [("a|b", 1.5), ("c", 1234.5)]).splitlines()
    assert written == ["| name | x |", "| :-- | ---: |", "| a/b | 1.5 |", "| c | 1234 |"]
    assert not met("x", float("nan"), 1.0)["met"]
    assert "NOT MET" in bars([met("x", 2.0, 1.0, at_most=True)])
