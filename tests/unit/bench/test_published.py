"""What is kept of the benchmarks' JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from evidence.published import form_of, level_of, publish, spelled_out
from evidence.sources import Source, reader, write_source

from sglang_nightjar.errors import UserError
from sglang_nightjar.observe.machine import command, machine

ABOUT = {"cpu": "a CPU", "cores": 2, "commit": "abc", "date": "2026-11-30"}
SERVED: dict[str, Any] = {
    "options": {
        "json": "/tmp/x/ladder.json",
        "policies": "off,nightjar",
        "loads": "c1",
        "repeats": 2,
        "trace": "/data/of/mine/trace.csv",
        "dataset": None,
        "slo": ["ttft:2000", "tpot:400"],
        "server_arguments": ["--max-total-tokens", "4096"],
    },
    "machine": ABOUT,
    "samples": [{"policy": "off", "load": "c1", "repeat": 0, "output_throughput": 12.3456789}],
    "servers": {"off": {"retractions": 0, "moves": {}, "timeline": [[float(at), 1, 0, 64, 0] for at in range(500)]}},
}


def written(content: Any, path: Path) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_run_that_kept_its_options_only_gets_its_command(tmp_path: Path) -> None:
    kept = publish(written(SERVED, tmp_path / "ladder.json"))
    assert (kept.name, kept.form, kept.level) == ("ladder", "serving", "L3")
    assert kept.machine["command"] == (
        "scripts/python bench/serving.py --policies off,nightjar --loads c1 --repeats 2 --trace trace.csv "
        "--slo ttft:2000 tpot:400 '--server-arguments=--max-total-tokens 4096'"
    )
    assert kept.data["samples"][0]["output_throughput"] == 12.3457
    assert len(kept.data["servers"]["off"]["timeline"]) == 167
    text = json.dumps([kept.machine, kept.data])
    assert "/data/of" not in text and "/tmp" not in text and "machine" not in kept.data


def test_a_run_that_has_not_ended_is_refused(tmp_path: Path) -> None:
    running = {key: value for key, value in SERVED.items() if key != "servers"}
    with pytest.raises(UserError, match="has not ended"):
        publish(written(running, tmp_path / "ladder.json"))


def test_answers_are_kept_as_which_of_them_are_equal(tmp_path: Path) -> None:
    texts = {"off": [91, 92, 93], "static:3": [91, 95, 93], "nightjar": [99, 95, 93]}
    samples = [{"policy": name, "load": "c1", "repeat": 0, "answers": each} for name, each in texts.items()]
    kept = publish(written({**SERVED, "samples": samples}, tmp_path / "ladder.json"))
    assert [sample["answers"] for sample in kept.data["samples"]] == [[0, 0, 0], [0, 1, 0], [1, 1, 0]]


def test_what_a_file_does_not_say_is_taken_from_the_file_beside_it(tmp_path: Path) -> None:
    path = written({"level": "L1", "rows": [], "machine": {}}, tmp_path / "tax.json")
    with pytest.raises(UserError, match=r"does not say its cpu, cores, commit, date, command: give them in tax\.about"):
        publish(path)
    written({**ABOUT, "command": "scripts/python x --trace /a/b/c.csv"}, tmp_path / "tax.about.json")
    assert publish(path).machine["command"] == "scripts/python x --trace c.csv"


def test_a_file_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the JSON of a benchmark"):
        publish(written({"x": 1}, tmp_path / "x.json"))
    (tmp_path / "y.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        publish(tmp_path / "y.json")


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        (("summary", "stationary", "changes"), "regret"),
        (("closed", "poisson", "dynamic", "crossover"), "paper"),
        (("scenario", "results", "level"), "scenario"),
        (("policies", "steps", "max_gamma"), "deciding"),
        (("kernels", "copy_bytes_per_s"), "kernels"),
        (("rows", "failed"), "gpu"),
        (("rows", "options"), "lossless"),
        (("rows",), "tax"),
        (("servers", "set_ups", "options"), "overhead"),
        (("linear", "servers"), "platform"),
        (("servers",), "platform"),
        (("linear",), "platform"),
    ],
)
def test_forms_are_told_apart(keys: tuple[str, ...], form: str) -> None:
    assert form_of(dict.fromkeys(keys, [])) == form


def test_a_served_run_and_a_calibration_are_told_apart() -> None:
    assert form_of({"samples": [{"policy": "off"}]}) == "serving"
    assert form_of({"samples": [{"policy": "off", "L1": {}}]}) == "serving", "on an emulated device"
    assert form_of({"samples": [{"policy": "off", "L1": {}, "L2": {}}]}) == "calibrate"


def test_levels() -> None:
    assert level_of({"level": "L1"}, "paper", {}) == "L1"
    assert level_of({"options": {"real": False}}, "calibrate", {}) == "L1 and L2"
    assert level_of({"options": {"real": True}}, "calibrate", {}) == "L1 to L3"
    assert level_of({"options": {"server_arguments": []}}, "serving", {}) == "L3"
    assert level_of({"options": {"server_arguments": ["--nightjar-emulate", "x"]}}, "serving", {}) == "L2"
    assert level_of({"options": {"set_up": "4090-r1-qwen-7b"}}, "serving", {}) == "L2"
    assert level_of({"options": {"emulate": "4090-r1-qwen-7b"}}, "lossless", {}) == "L2"
    assert level_of({}, "gpu", {"gpu": "H100"}) == "L4"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    source = Source("tax", "tax", "L3", {**ABOUT, "command": "x"}, {"rows": [{"a": 1.5}, {"a": None}]})
    path = write_source(source, tmp_path / "results")
    assert reader(path.parent)("tax") == source and reader(path.parent)("none") is None
    assert '   {"a":1.5},' in path.read_text().splitlines()
    path.write_text("{}")
    with pytest.raises(UserError, match="not a file of bench/report"):
        reader(path.parent)("tax")


def test_a_process_says_how_to_repeat_it() -> None:
    script = str(Path(__file__).resolve().parents[3] / "bench" / "tax.py")
    assert command(["/x/python", script, "--a", "b c"]) == "scripts/python bench/tax.py --a 'b c'"
    assert command(["python", "-m", "sglang_nightjar.simulate"]) == "scripts/python -m sglang_nightjar.simulate"
    assert set(machine()) >= {"cpu", "cores", "commit", "date", "command"} and machine()["commit"]


def test_options_are_spelled_out() -> None:
    options = {"json": "x.json", "plot": None, "set_up": "s", "speed": 1.0, "acceptance": "", "quick": False}
    assert spelled_out("bench/calibrate.py", options) == "scripts/python bench/calibrate.py --set-up s --speed 1.0"
    options |= {"emulate": "s", "emulate_speed": 1.0, "real": True}
    words = "scripts/python bench/calibrate.py --emulate s --emulate-speed 1.0 --real"
    assert spelled_out("bench/calibrate.py", options) == words
