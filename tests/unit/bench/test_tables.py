"""Tables of the suites' and benchmarks' own JSON: the figures that are in it, at the place where they belong."""

import json
from pathlib import Path
from typing import Any

import pytest
from evidence import beside_paper, kinds, parts
from evidence.published import publish
from evidence.sources import Source, reader, write_source
from evidence.suites import scenario_results

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate import __main__ as simulate
from sglang_nightjar.simulate.fields import as_json
from sglang_nightjar.simulate.suite_paper_report import PAPER

ABOUT = {"cpu": "a CPU", "cores": 2, "commit": "abc", "date": "2026-11-30", "command": "scripts/python x"}
SET_UP = "4090-r1-qwen-7b"
POLICIES = "off,no-draft,static:3,nightjar,oracle"


def simulated(folder: Path, name: str, *words: str) -> tuple[Source, dict[str, Any]]:
    """What the simulator's command writes: as it is kept, and as it was."""
    assert simulate.main([*words, "--json", str(folder / f"{name}.json")]) == 0
    path = write_source(publish(folder / f"{name}.json"), folder / "results")
    source = reader(path.parent)(name)
    assert source is not None
    return source, json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, dict[str, Any]]:
    return simulated(tmp_path_factory.mktemp("e"), "paper", "--suite", "paper", "--quick", "--policies", POLICIES)


@pytest.fixture(scope="module")
def regret(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, dict[str, Any]]:
    words = ("--suite", "regret", "--quick", "--policies", "static:5,off")
    return simulated(tmp_path_factory.mktemp("e"), "regret", *words)


def shown(source: Source, kind: str, *words: str) -> str:
    text = kinds.render(kind, [source.name, *words], {source.name: source}.get, Path("plots"))
    assert text is not None and text.startswith(source.caption())
    return text


def cells(text: str) -> list[list[str]]:
    """Rows of the tables in `text`, rules left out."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if not set("".join(row)) <= set(":- ")]


def test_the_suite_says_where_it_ran(paper: tuple[Source, dict[str, Any]]) -> None:
    source, _ = paper
    assert source.level == "L1" and source.caption().startswith("L1, simulated; ")
    assert source.machine["commit"] in source.about() and source.machine["command"] in source.about()


def test_the_closed_loop_shows_every_policy_and_rung(paper: tuple[Source, dict[str, Any]]) -> None:
    source, raw = paper
    head, *rows = cells(shown(source, "closed", SET_UP))
    assert head == ["policy", "1", "16", "256"] and [row[0] for row in rows] == POLICIES.split(",")
    for row in raw["closed"]:
        cell = rows[POLICIES.split(",").index(row["policy"])][head.index(row["load"])]
        assert float(cell) == pytest.approx(row["metrics"]["throughput"], rel=1e-3)


def test_bars_are_counted(paper: tuple[Source, dict[str, Any]], regret: tuple[Source, dict[str, Any]]) -> None:
    for source, raw in (paper, regret):
        missed = [bar for bar in raw["bars"] if not bar["met"]]
        text = shown(source, "bars")
        assert f"{len(raw['bars']) - len(missed)} of {len(raw['bars'])} met" in text
        assert [row[0] for row in cells(text)[1:]] == [bar["name"] for bar in missed]


def test_the_open_loads_are_judged_as_the_suite_judged_them(paper: tuple[Source, dict[str, Any]]) -> None:
    source, raw = paper
    values = {bar["name"]: bar["value"] for bar in raw["bars"]}
    head, row = cells(shown(source, "poisson"))
    for load, cell in zip(head[1:], row[1:], strict=True):
        own = values[f"{SET_UP} (b) {load}: mean latency / best static"]
        assert float(cell.split()[0]) == pytest.approx(own, abs=1e-3)
    _, *rows = cells(shown(source, "dynamic"))
    for row in rows:
        assert float(row[3]) == pytest.approx(values[f"{SET_UP} (c) {row[1]}: mean latency / best other"], abs=1e-3)
    assert [row[1] for row in rows] == ["ramp", "bursts", "onoff", "synthetic"]
    ratios = dict(zip(*cells(shown(source, "closed-ratios"))[::2], strict=True))
    assert float(ratios["oracle, mean"]) == pytest.approx(values[f"{SET_UP} (a) mean: / oracle"], abs=1e-3)
    assert len(cells(shown(source, "all-loads", SET_UP))) == (2 + 4) * (1 + len(POLICIES.split(",")))
    assert len(cells(shown(source, "crossover"))) == 1 + 2


def test_regret_and_changes(regret: tuple[Source, dict[str, Any]]) -> None:
    source, raw = regret
    _, *rows = cells(shown(source, "regret"))
    for row, entry in zip(rows, raw["summary"], strict=True):
        assert row[:3] == [entry["world"], entry["policy"], "3,000"]
        assert float(row[3].split()[0]) == pytest.approx(entry["mean"][-1], rel=0.01)
    head, *rows = cells(shown(source, "changes"))
    assert head == ["change", "static:5", "off"] and len(rows) == 6
    own = [row["excess"] for row in raw["changes"] if (row["world"], row["policy"]) == (rows[0][0], "off")]
    assert float(rows[0][2]) == pytest.approx(100 * sum(own) / len(own), rel=0.06)


def test_a_scenario_is_kept_as_it_was(tmp_path: Path) -> None:
    words = ("--scenario", "4090-closed-64", "--policies", "off,static:3", "--seeds", "2")
    source, raw = simulated(tmp_path, "scenario", *words)
    head, *rows = cells(shown(source, "scenario"))
    own = [row["metrics"]["throughput"] for row in raw["results"] if row["policy"] == "static:3"]
    assert head[:2] == ["policy", "tok/s"] and float(rows[1][1]) == pytest.approx(sum(own) / 2, rel=1e-3)
    kept = scenario_results(source.data)
    assert [bool(result.timeline) for result in kept] == [True, False, True, False]
    assert json.loads(as_json(kept[0].metrics))["steps"] == raw["results"][0]["metrics"]["steps"]


# Of bench/serving.py: policy -> tokens/s by load, in two repeats.
RATES = {"off": (10.0, 40.0), "static:3": (18.0, 30.0), "nightjar": (20.0, 38.0), "nightjar+elastic:off": (19.0, 36.0)}


def serving(timeline: Any, moves: Any) -> Source:
    samples = [
        {"policy": policy, "load": load, "repeat": repeat, "output_throughput": rate * (1 + repeat / 10)}
        | {"seconds": 64.0, "mean_ttft_ms": 100.0, "mean_e2e_latency_ms": 1e4 / rate}
        for repeat in (0, 1)
        for policy, rates in RATES.items()
        for load, rate in zip(("c1", "c48"), rates, strict=True)
    ]
    servers = {policy: {"retractions": 3, "timeline": timeline, "moves": moves} for policy in RATES}
    options = {"policies": ",".join(reversed(RATES)), "loads": "c1,c48", "max_tokens": 64}
    return Source("ladder", "serving", "L3", ABOUT, {"options": options, "samples": samples, "servers": servers})


def test_a_ladder_of_real_servers() -> None:
    text = shown(serving([], {}), "ladder")
    assert "medians of 2 repeats" in text and "2026-11-30, commit abc" in text
    head, first, last = cells(text)
    assert head[1:5] == list(reversed(RATES)), "in the order asked for, not the order run"
    assert first == ["c1", "19.95", "21", "18.9", "10.5", "1.053", "100 / 100"] and last[5] == "0.950"
    assert "**c48**, 40 requests" in shown(serving([], {}), "loads"), "40 tokens/s for 64 s, 64 tokens each"


def test_tokens_while_requests_came_are_taken_where_they_were_counted() -> None:
    source = serving([], {})
    for sample in source.data["samples"]:
        sample["throughput"] = 2 * sample["output_throughput"]
    assert cells(shown(source, "ladder"))[1][1] == "39.9"
    del source.data["samples"][0]["throughput"]
    assert cells(shown(source, "ladder"))[1][1] == "19.95", "all of them or none"


@pytest.mark.parametrize(
    ("timeline", "moves"),
    [
        ([[0.0, 1, 3, 64, 0], [1.0, 2, 0, 96, 2]], {"evict": {"steps": 3, "longest_over_median": 1.25}}),
        (
            {"time_s": [0.0, 1.0], "slots": [64, 96]},
            [{"kind": "evict", "longest_over_median": 1.25}, {"kind": "evict", "longest_over_median": None}],
        ),
    ],
)
def test_the_pool_of_either_version(timeline: Any, moves: Any) -> None:
    assert cells(shown(serving(timeline, moves), "pool"))[1] == ["off", "64 to 96", "evict: 1.2", "3"]


def test_moves() -> None:
    assert "not kept one by one" in shown(serving([], {}), "moves")
    assert "never moved" in shown(serving({}, []), "moves")
    move = {"kind": "reload", "outcome": "undone", "began_s": 3.0, "seconds": 1.5, "phases": {"drain": 1.0}}
    move |= {"pause_s": 0.004, "decode_steps": 7, "longest_over_median": 1.25, "slots": [96, 64], "moved_slots": 5}
    move |= {"dropped_slots": 6, "copied_bytes": 1 << 20, "most_copied_bytes": 1 << 19}
    _, row, *_ = cells(shown(serving({}, [move]), "moves"))
    assert row[:6] == ["off", "reload (undone)", "3.0", "1.50", "1.00", "4.0"] and "96 to 64" in row


def test_beside_the_paper(paper: tuple[Source, dict[str, Any]]) -> None:
    text = beside_paper.table([paper[0], serving([], {})])
    head, *rows = cells(text)
    assert head == ["figure", "paper", "L1", "L3"] and len(rows) == len(PAPER) + len(beside_paper.OTHERS)
    found = {row[0]: row[1:] for row in rows}
    assert found["throughput over static:3, mean of the closed loops"][::2] == ["+8.3 %", "+18.9 % (ladder)"]
    assert found["static:3 against off, worst load"][2] == "-25.0 % (ladder)"
    assert found["latency against static:3, best load"][2] == "-21.1 % (ladder)"
    assert found["elastic memory on against off, best load"] == ["+5.6 %", "-", "+5.6 % (ladder)"]
    assert found["deciding, of a decode step"] == ["10 us of 34 ms", "-", "-"]
    assert "(paper)" in found["throughput over off, mean of the closed loops"][1]


def test_calibration() -> None:
    level = {"tokens_s": 100.0, "ttft_ms": 10.0, "tpot_ms": 5.0, "mean_gamma": 2.0}
    seen = {**level, "tokens_s": 90.0, "device_share": 0.5, "scheduler_ms": 3.0}
    samples = [
        {"policy": "off", "load": "c1", "L1": level, "L2": seen, "L1*": {**level, "tokens_s": 91.0}},
        {"policy": "off", "load": "r2", "L1": level, "L2": seen},
    ]
    for options in ({"set_up": SET_UP, "speed": 0.1}, {"emulate": SET_UP, "emulate_speed": 0.1}):
        source = Source("calibrate", "calibrate", "L1 and L2", ABOUT, {"options": options, "samples": samples})
        text = shown(source, "calibrate")
        head, closed, poisson = cells(text)
        assert f"{SET_UP}. L2 is the emulated device at 0.1" in text
        assert head[2:5] == ["tokens/s, L2", "/ L1", "/ L1*"]
        assert closed[2:5] == ["90", "0.900", "0.989"] and poisson[2:5] == ["90", "0.900", "-"]
        assert closed[-5:] == ["50.0%", "3.00", "2.00", "2.00", "2.00"]


def test_parts() -> None:
    rows = [{"batch": 1, "off_ms": 10.0, "away_ms": 10.1, "ratio": 1.01, "ratios": [1.0, 1.01, 1.02]}]
    assert cells(parts.tax({"rows": rows}))[1] == ["1", "10.0", "10.1", "1.010", "1.000 1.010 1.020"]
    gammas = [
        {"concurrency": c, "gamma": gamma, "tokens_per_s": rate, "accept_length": 2.0, "speedup": rate / 10.0}
        for c, gamma, rate in ((1, "off", 10.0), (1, "3", 15.0), (8, "off", 10.0), (8, "3", 9.0))
    ]
    text = parts.servers({"servers": gammas})
    assert cells(text)[2] == ["1", "3", "15.0", "2.00", "1.50"]
    assert text.endswith("Fastest gamma: 3 at concurrency 1, off at concurrency 8.")
    row = {"policy": "nightjar", "requests": 2000, "tokens": 70000, "mismatches": 0, "evictions": 9, "reloads": 9}
    row |= {"moved_slots": 12, "catchup_tokens": 1, "seconds": 3.0}
    assert cells(parts.lossless({"rows": [row]}))[1] == ["nightjar", "2,000", "70,000", "0", "9", "9", "12", "1"]
    line = {"rows": 4, "plain_ms": 2.0, "packed_ms": 1.0, "int8_ms": 0.5, "packed_speedup": 2.0}
    assert cells(parts.linears({"linear": [line]}))[1] == ["4", "2.0", "1.0", "0.5", "2.00"]
    kernel = {"kernel": "k", "case": "c", "bytes": 4e6, "floor_us": 2.0, "device_us": 4.0, "call_us": 5.0}
    assert cells(parts.kernels({"copy_bytes_per_s": 2e12, "kernels": [kernel]}))[1][2:] == [
        *("4.00", "2.0", "4.0", "2.00", "1000", "5.0")
    ]
    check = {"part": "arena", "check": "x", "result": "ok", "figure": "3 GB/s", "values": {"a": 1.0}}
    assert cells(parts.gpu({"rows": [check]}))[1] == ["arena", "x", "ok", "3 GB/s"]


def test_overhead_is_shown_with_the_machine_it_was_measured_on() -> None:
    figure = {"median": 100.0, "mean": 110.0, "p99": 200.0}
    row = {"steps": 9, "nightjar_us": figure, "sglang_us": 900.0, "device_us": 19_000.0, "more_cpu_us": [1.0, 2.0, 3.0]}
    row |= {"of_plain_step": 0.005, "of_plain_scheduler": 0.1, "more_cpu_of_plain_step": 0.0001, "by_owner_us": {}}
    data = {"options": {"batch": "64", "set_up": SET_UP}, "servers": {"plain": row, "gamma 0": row}, "set_ups": {}}
    text = shown(Source("overhead", "overhead", "L2", {**ABOUT, "load": 1.5}, data), "overhead")
    assert "a CPU, 2 cores, load 1.5" in text and cells(text)[2][:3] == ["gamma 0", "9", "100"]


def test_blocks_that_make_no_sense_are_named(regret: tuple[Source, dict[str, Any]]) -> None:
    read = {"regret": regret[0]}.get
    for kind, words, message in (
        ("nothing", ["regret"], "no block is called 'nothing'"),
        ("tax", [], "does not say of which file"),
        ("tax", ["regret"], "made of a tax file, and regret.json is a regret file"),
        ("closed", ["regret"], "made of a paper file"),
        ("regret", ["regret", "word"], "the block 'regret regret word'"),
    ):
        with pytest.raises(UserError, match=message):
            kinds.render(kind, words, read, Path("plots"))
    assert kinds.render("tax", ["tax"], read, Path("plots")) is None
