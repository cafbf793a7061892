"""Mistakes: at start one line and a non-zero exit, while serving an HTTP error and a server that lives on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, free_port, serve, tail


def launch(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Starts a server that must not come up, and waits for its end."""
    command = [sys.executable, "-m", "sglang_nightjar.launch_server", "--port", str(free_port()), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == lines[0]
    return lines[0]


def test_a_damaged_draft(tiny_target: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_target, tmp_path / "draft"))
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    line = error_line(launch("--model-path", tiny_target, "--speculative-draft-model-path", draft))
    assert line.startswith(f"error: --speculative-draft-model-path {draft}: model.safetensors is damaged")


def test_what_sglang_itself_refuses(tiny_target: Path) -> None:
    """SGLang's checks come as tracebacks from it; here they are one line too."""
    line = error_line(launch("--model-path", tiny_target, "--schedule-conservativeness", "-1"))
    assert line.startswith("error: SGLang refuses these options: schedule_conservativeness")


def test_help_lists_both_kinds_of_flags() -> None:
    done = launch("--help")
    assert done.returncode == 0
    for flag in (
        "--model-path",
        "--speculative-draft-model-path",
        "--tp-size",
        "--nightjar-policy",
        "--nightjar-config",
    ):
        assert re.search(rf"^ +.*{flag}\b", done.stdout, re.MULTILINE), flag
    assert "nightjar_cpu" in done.stdout


@pytest.fixture(scope="module")
def server(tiny_target: Path, tiny_draft: Path) -> Iterator[Server]:
    with serve("--model-path", tiny_target, "--speculative-draft-model-path", tiny_draft) as running:
        yield running


def answer(server: Server, path: str, body: Any) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


TEXT = "hello world"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/generate", {"text": "a b " * 3000}, "longer than the model's context length"),
        ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 100000}}, "context length"),
        ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": -5}}, "max_new_tokens"),
        ("/generate", {"text": TEXT, "sampling_params": {"temperature": -1}}, "temperature"),
        ("/generate", {"text": TEXT, "sampling_params": {"temperature": "hot"}}, "invalid type"),
        ("/generate", {"text": TEXT, "sampling_params": {"top_p": 2}}, "top_p"),
        ("/generate", {"text": TEXT, "sampling_params": {"gamma": 2}}, "unknown field"),
        ("/generate", {"text": TEXT, "sampling_params": {"regex": "(("}}, "regex"),
        ("/generate", {"text": TEXT, "sampling_params": {"stop_regex": "(("}}, "stop_regex"),
        ("/generate", {"text": TEXT, "sampling_params": {"custom_params": {"nightjar": 5}}}, "nightjar must be"),
        ("/generate", {"text": TEXT, "sampling_params": {"json_schema": "{"}}, "json"),
        ("/generate", {"text": TEXT, "sampling_params": {"logit_bias": {"999": 5}}}, "logit_bias"),
        ("/generate", {"text": TEXT, "sampling_params": {"beam_width": 3}}, "Beam search"),
        ("/generate", {"text": TEXT, "return_hidden_states": True}, "hidden states"),
        ("/generate", {"text": TEXT, "custom_logit_processor": "{}"}, "custom logit processor"),
        ("/generate", {"text": TEXT, "lora_path": "a"}, "LoRA"),
        ("/generate", {"text": TEXT, "return_sampling_mask": True}, "return_sampling_mask"),
        ("/generate", {"text": TEXT, "return_logprob": True, "top_logprobs_num": 5000}, "128 tokens"),
        ("/generate", {"text": TEXT, "return_logprob": True, "token_ids_logprob": [999]}, "out-of-vocabulary"),
        ("/generate", {"text": ""}, "no tokens"),
        ("/generate", {"text": [TEXT, ""]}, "no tokens"),
        ("/generate", {"input_ids": []}, "input_ids"),
        ("/generate", {"input_ids": [1, 128]}, "Token id 128 is not in the vocabulary; ids are 0 to 127"),
        ("/generate", {"input_ids": [1, -5]}, "Token id -5"),
        ("/generate", {"input_embeds": [[0.1] * 64] * 5}, "input_embeds"),
        ("/generate", {}, "should be provided"),
        ("/generate", [1, 2], "error"),
        ("/generate", b"{nope", "JSON"),
        ("/v1/chat/completions", b"{nope", "JSON"),
        ("/v1/chat/completions", {"model": "m", "messages": []}, "empty"),
        ("/v1/chat/completions", {"model": "m", "messages": "hi"}, "list"),
        ("/v1/chat/completions", {"model": "m", "messages": CHAT, "max_tokens": -5}, "max_new_tokens"),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a " * 3000}]}, "context"),
        ("/v1/completions", {"model": "m"}, "prompt"),
        ("/v1/embeddings", {"model": "m", "input": "hi"}, "embedding"),
        ("/v1/nonesuch", {}, "Not Found"),
        ("/release_memory_occupation", {}, "not supported on a CPU"),
        ("/resume_memory_occupation", {}, "not supported on a CPU"),
        ("/start_expert_distribution_record", {}, "not supported on a CPU"),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, str) else None,
)
def test_a_bad_request(path: str, body: Any, says: str, server: Server) -> None:
    status, text = answer(server, path, body)
    assert 400 <= status < 500, text
    assert says in text
    good = server.generate(TEXT, max_new_tokens=4, ignore_eos=True)
    assert len(good["output_ids"]) == 4


def test_a_bad_request_among_good_ones(server: Server) -> None:
    """It is turned away alone; those that run beside it are not touched."""
    alone = server.generate(TEXT, max_new_tokens=64, ignore_eos=True)["output_ids"]
    stuck = json.dumps({"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}})
    with subprocess.Popen(
        ["curl", "-s", f"{server.url}/generate", "-H", "Content-Type: application/json", "-d", stuck],
        stdout=subprocess.PIPE,
    ) as other:
        for _ in range(5):
            assert server.status_of("/generate", {"input_ids": [1, 999]}) == 400
        output, _ = other.communicate(timeout=120)
    assert json.loads(output)["output_ids"] == alone


def test_ctrl_c_ends_the_server_cleanly(server: Server) -> None:
    """The last test of this module: a terminal sends SIGINT to every process of the group."""
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(30) == 130
    time.sleep(0.2)
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log, tail(server.log)
    assert "KeyboardInterrupt" not in log
