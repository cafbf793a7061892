"""`sglang_nightjar.Engine`: the in-process twin of `sglang.Engine`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A script of a user's own: SGLang's processes import it anew, hence the last two lines.
SCRIPT = """
import json, os, sys
import psutil
from sglang_nightjar import Engine
from sglang_nightjar.errors import UserError

def complaint(**options):
    try:
        Engine(**options)
    except UserError as error:
        return str(error)

def main(target, draft, report):
    seen = {"complaints": [
        complaint(nightjar_policy="magic"),
        complaint(nightjar_gamma=3),
        complaint(model_path=target, enable_lora=True),
        complaint(model_path=target, model_pat="x"),
        complaint(model_path=target, nightjar_policy="static:2"),
        complaint(model_path=target + "-none"),
    ]}
    engine = Engine(model_path=target, speculative_draft_model_path=draft, nightjar_policy="static:2", random_seed=1)
    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    seen["answers"] = engine.generate(["hello world", "one two three"], greedy)
    seen["streamed"] = [part["text"] for part in engine.generate("hello world", greedy, stream=True)]
    seen["tokens"] = engine.generate(input_ids=[5, 6, 7], sampling_params=greedy)
    seen["info"] = {name: engine.get_server_info()[name] for name in ("speculative_num_steps", "device", "version")}
    processes = psutil.Process().children(recursive=True)
    engine.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=20)
    seen["before"], seen["left"] = len(processes), [process.cmdline() for process in alive]
    seen["children"] = [child.cmdline() for child in psutil.Process().children() if child.status() != "zombie"]
    with open(report, "w") as file:
        json.dump(seen, file)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def seen(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("engine")
    script, report = folder / "script.py", folder / "report.json"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tiny_target), str(tiny_draft), str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads(report.read_text())
    return content


def test_it_generates_and_speculates(seen: dict[str, Any]) -> None:
    for answer in seen["answers"]:
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == len(answer["output_ids"]) == 24
        assert meta["spec_accept_length"] > 1
        assert meta["spec_verify_ct"] < 24
    assert len(seen["tokens"]["output_ids"]) == 24


def test_streaming_ends_with_the_whole_text(seen: dict[str, Any]) -> None:
    assert len(seen["streamed"]) > 1
    assert seen["streamed"][-1] == seen["answers"][0]["text"]


def test_it_serves_as_configured(seen: dict[str, Any]) -> None:
    assert seen["info"] == {"speculative_num_steps": 2, "device": "cpu", "version": "0.5.23"}


def test_shutdown_leaves_no_process(seen: dict[str, Any]) -> None:
    assert seen["before"] >= 2
    assert seen["left"] == []
    assert seen["children"] == []


def test_mistakes_are_one_line_exceptions(seen: dict[str, Any]) -> None:
    expected = ("unknown policy 'magic'", "unknown Nightjar option 'gamma'", "--enable-lora is not supported")
    expected += ("unknown option 'model_pat'", "static:2 needs a draft", "no such folder")
    assert len(seen["complaints"]) == len(expected)
    for complaint, words in zip(seen["complaints"], expected, strict=True):
        assert words in complaint
        assert "\n" not in complaint
