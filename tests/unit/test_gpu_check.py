"""`scripts/gpu_check.sh` without a GPU: what it refuses, its table, and that one part's failure spares the others."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))
ABOUT = {"gpu": "a GPU", "driver": "1.2", "torch": "2", "date": "2026-11-30", "commit": "abc"}


@pytest.fixture(scope="module")
def gpu_check() -> Iterator[ModuleType]:
    path = list(sys.path)
    sys.path.append(str(ROOT / "bench"))
    import gpu_check

    yield gpu_check
    sys.path[:] = path


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "NIGHTJAR_PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, check=False)


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
@pytest.mark.parametrize("command", [["scripts/gpu_check.sh"], [sys.executable, "bench/gpu_check.py"]])
def test_without_a_gpu_it_says_so_in_one_line_and_fails(command: list[str], tmp_path: Path) -> None:
    done = run(*command, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("gpu_check: ") and "no" in line and line.endswith("run it on a machine with one")
    assert not list(tmp_path.iterdir()), "nothing was found, so nothing is written"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "arena,graphs"], "--parts has graphs; choose from arena, reload, kernels, graph, end-to-end"),
        (["--model", "x"], "--model and --draft go together; give both, or neither"),
        (["--weights-mib", "1"], "--weights-mib is 1; choose 32 to 65536"),
    ],
)
def test_words_that_make_no_sense_are_named(
    gpu_check: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.parse(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_words_are_read(gpu_check: ModuleType) -> None:
    options = gpu_check.parse(["--parts", "graph,arena", "--device", "1", "--server-arguments", "--tp 2 --x 'a b'"])
    assert options.parts == ["graph", "arena"] and options.device == 1
    assert options.server_arguments == ["--tp", "2", "--x", "a b"]
    assert gpu_check.parse([]).parts == list(gpu_check.PARTS)


def test_help_needs_no_gpu() -> None:
    done = run("scripts/gpu_check.sh", "--help")
    assert done.returncode == 0 and "--weights-mib" in done.stdout


def test_without_models_the_servers_are_skipped(gpu_check: ModuleType) -> None:
    (row,) = gpu_check.work_of("end-to-end", gpu_check.parse([]))()
    assert (row.result, row.figure) == ("skipped", "no --model and --draft")
    assert not gpu_check.failed([row])


def test_a_part_that_fails_is_a_row_and_the_others_run(gpu_check: ModuleType) -> None:
    rows = sys.modules["gpu_rows"]
    said: list[str] = []

    def broken() -> list[Any]:
        raise ValueError("rows differ\nand more")

    good = rows.Row("graph", "replay", figure="3 times | same", values={"seconds": 1.5})
    found = [*rows.rows_of("kernels", broken, said.append), *rows.rows_of("graph", lambda: [good], said.append)]
    assert rows.failed(found) and not rows.failed(found[1:])
    assert any("Traceback" in line for line in said), "where it failed is not lost"
    lines = rows.table(found, ABOUT).splitlines()
    assert lines[0] == "a GPU, driver 1.2, torch 2, 2026-11-30, commit abc"
    assert lines[-2:] == [
        "| kernels | runs to its end | FAILED | ValueError: rows differ |",
        "| graph | replay | ok | 3 times / same |",
    ]
    assert {line.count("|") for line in lines[2:]} == {5}
    record = json.loads(json.dumps(rows.as_json(found, ABOUT)))
    assert record["failed"] is True and record["rows"][1]["values"] == {"seconds": 1.5}
