"""Scenario files, measured points, the command line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.__main__ import main
from sglang_nightjar.simulate.measured import read_measured
from sglang_nightjar.simulate.scenario import built_in, make_cost, read_scenario, run_scenario

GOOD: dict[str, Any] = {
    "name": "mine",
    "set_up": "4090-r1-qwen-7b",
    "arrivals": {"kind": "poisson", "rate": 4},
    "lengths": {"kind": "fixed", "prompt": 50, "output": 20},
    "duration_s": 5,
}
POINTS: dict[str, Any] = {
    "name": "box",
    "source": "by hand",
    "batches": [1, 4],
    "gammas": [0, 2],
    "seconds": [[0.1, 0.4], [0.3, 1.2]],
    "prefill_token_s": 1e-3,
    "draft_token_s": 1e-4,
    "slots_resident": 1000,
    "slots_evicted": 1500,
}


def write(tmp_path: Path, content: dict[str, Any], name: str = "mine.json") -> str:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", built_in())
def test_built_in_scenarios_are_sound(name: str) -> None:
    assert read_scenario(name).name == name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"set_up": "4091"}, "field set_up: no set-up is called '4091'"),
        ({"arrivals": {"kind": "poisson", "rate": 0}}, "field arrivals.rate: .*> 0"),
        ({"arrivals": {"kind": "poison", "rate": 1}}, "field arrivals"),
        ({"arrivals": {"kind": "closed", "concurrency": "many"}}, "field arrivals.concurrency"),
        ({"arrivals": {"kind": "trace", "file": "none.csv"}}, "cannot read the trace"),
        ({"lengths": {"kind": "named", "name": "x"}}, "field lengths.name: 'x' is not one of"),
        ({"acceptance": {"domains": [{"alpha": 1.5}]}}, r"field acceptance.domains\[0\].alpha"),
        ({"acceptance": {"domains": []}}, "field acceptance.domains: at least one"),
        (
            {"acceptance": {"drift": [{"at_s": 9, "scale": 1}, {"at_s": 3, "scale": 1}]}},
            "field acceptance.drift: points must be in the order",
        ),
        ({"warmup_s": 5}, "field warmup_s: 5.0 s leaves nothing"),
        ({"durations": 5}, "unknown field `durations`"),
        ({"server": {"max_running": 0}}, "field server.max_running"),
        ({"set_up": "none.json"}, "cannot read the measured points"),
    ],
)
def test_mistakes_name_the_field(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    path = write(tmp_path, GOOD | change)
    with pytest.raises(UserError, match=expected) as raised:
        read_scenario(path)
    assert path in str(raised.value)


def test_a_missing_field_and_what_is_no_json(tmp_path: Path) -> None:
    path = write(tmp_path, {key: value for key, value in GOOD.items() if key != "arrivals"})
    with pytest.raises(UserError, match="missing required field `arrivals`"):
        read_scenario(path)
    Path(path).write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_scenario(path)
    with pytest.raises(UserError, match="no scenario is called 'nothing'.*4090-closed-64"):
        read_scenario("nothing")


def test_measured_points_interpolate_and_extrapolate(tmp_path: Path) -> None:
    cost = read_measured(Path(write(tmp_path, POINTS)))
    assert cost.max_gamma == 2
    assert cost.step_s(1, 0, 0) == pytest.approx(0.1)
    assert cost.step_s(2, 0, 0) == pytest.approx(0.2)
    assert cost.step_s(4, 1, 0) == pytest.approx(0.8)
    assert cost.step_s(6, 0, 0) == pytest.approx(0.6)
    assert cost.step_s(4, 2, 0, drafters=2) == pytest.approx(0.8)
    assert cost.step_s(4, 2, 0, drafters=0) == pytest.approx(0.4)
    assert cost.prefill_s(100, 0, draft=True) == pytest.approx(0.11)
    assert (cost.slots(True), cost.slots(False)) == (1000, 1500)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"gammas": [1, 2]}, "field gammas must begin with 0"),
        ({"batches": [4, 1]}, "field batches must rise"),
        ({"seconds": [[0.1, 0.4]]}, "field seconds must have 2 rows"),
        ({"seconds": [[0.1, 0.4], [0.1]]}, "field seconds must have 2 rows .* of 2"),
        ({"seconds": [[0.1, 0], [1, 1]]}, "field seconds"),
        ({"slots_evicted": 10}, "field slots_evicted must not be below"),
    ],
)
def test_mistakes_in_measured_points(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        read_measured(Path(write(tmp_path, POINTS | change)))


def test_a_scenario_of_measured_points_runs(tmp_path: Path) -> None:
    write(tmp_path, POINTS, "points.json")
    scenario = read_scenario(write(tmp_path, GOOD | {"set_up": "points.json"}))
    assert make_cost(scenario).max_gamma == 2
    result = run_scenario(scenario, "static:2", seed=0)
    assert result.metrics.tokens == 20 * result.metrics.requests > 0
    with pytest.raises(UserError, match="gamma exceeds"):
        run_scenario(scenario, "static:3", seed=0)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, figures = write(tmp_path, GOOD), tmp_path / "out.json"
    arguments = ["--scenario", path, "--policies", "off,static:2,oracle", "--seeds", "2", "--json", str(figures)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "static:2" in printed and "L1" in printed
    written = json.loads(figures.read_text())
    assert len(written["results"]) == 6
    assert {"throughput", "e2e", "gammas", "goodput"} <= set(written["results"][0]["metrics"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give --scenario NAME or --suite"),
        (["--scenario", "4090-ramp", "--policies", "offf"], "unknown policy 'offf'"),
        (["--scenario", "4090-ramp", "--policies", "oracle:3"], "unknown policy 'oracle:3'"),
        (["--scenario", "4090-ramp", "--seeds", "0"], "--seeds is 0"),
        (["--scenario", "4090-ramp", "--json", "/no/such/folder/x.json"], "cannot write /no/such/folder"),
        (["--scenario", "4090-ramp", "--trace", "/no/trace.csv"], "cannot read the trace"),
        (["--suite", "regret", "--policies", "x"], "unknown policy 'x'"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and expected in lines[0]


def test_a_picture_without_matplotlib_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--suite", "paper", "--plot", str(tmp_path / "p.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
