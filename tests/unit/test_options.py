"""From what a user gave to what SGLang is started with: completed, contradictions refused."""

import argparse
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_nightjar import launch_server
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.demo import smollm2
from sglang_nightjar.errors import UserError
from sglang_nightjar.serving.options import complete_options
from sglang_nightjar.serving.startup import _settle_elastic, check_ranges, server_options


def on_cpu(**options: Any) -> NightjarConfig:
    return NightjarConfig(platform="cpu", **options)


def complaint(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as raised:
        call(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> str:
    """The demo model's folder, without converting anything."""
    monkeypatch.setattr(smollm2, "prepare_demo_model", lambda: Path("/demo"))
    return "/demo"


def speculation(options: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("speculative_"): value for name, value in options.items() if "speculative_" in name}


def test_nothing_given_serves_the_demo_pair(demo: str) -> None:
    options = complete_options(on_cpu(), {})
    assert options["model_path"] == demo
    assert options["served_model_name"] == "SmolLM2-135M-Instruct"
    assert speculation(options) == {
        "draft_model_path": demo,
        "draft_model_quantization": "nightjar_w8",
        "algorithm": "STANDALONE",
        "num_steps": 5,
        "num_draft_tokens": 6,
        "eagle_topk": 1,
    }
    assert options["device"] == "cpu"
    assert options["dtype"] == "float32"


def test_the_demo_pair_takes_the_policy_and_the_bits(demo: str) -> None:
    options = complete_options(on_cpu(policy="static:2", draft_bits=4), {})
    assert speculation(options)["draft_model_quantization"] == "nightjar_w4"
    assert speculation(options)["num_steps"] == 2
    assert complete_options(on_cpu(max_gamma=2), {})["speculative_num_steps"] == 2
    assert complete_options(on_cpu(), {"speculative_num_steps": 1})["speculative_num_draft_tokens"] == 2


def test_the_demo_model_without_a_draft(demo: str) -> None:
    for policy in ("off", "static:0"):
        options = complete_options(on_cpu(policy=policy), {})
        assert options["model_path"] == demo
        assert speculation(options) == {}


def test_another_draft_for_the_demo_target(demo: str) -> None:
    options = complete_options(on_cpu(), {"speculative_draft_model_path": "/other"})
    assert "speculative_draft_model_quantization" not in options
    assert "draft_bits" not in complaint(
        complete_options, on_cpu(draft_bits=4), {"speculative_draft_model_path": "/other"}
    )


def test_a_model_without_a_draft_is_served_plainly() -> None:
    options = complete_options(on_cpu(), {"model_path": "/model"})
    assert speculation(options) == {}
    assert speculation(complete_options(on_cpu(policy="off"), {"model_path": "/model"})) == {}


def test_a_model_with_a_draft_speculates() -> None:
    given = {"model_path": "/model", "speculative_draft_model_path": "/draft"}
    assert complete_options(on_cpu(), given)["speculative_num_steps"] == 5
    assert complete_options(on_cpu(policy="static:5"), given)["speculative_num_draft_tokens"] == 6
    agreeing = {**given, "speculative_num_steps": 2, "speculative_num_draft_tokens": 3}
    assert complete_options(on_cpu(policy="static:2"), agreeing)["speculative_num_steps"] == 2


def on_gpu(**options: Any) -> NightjarConfig:
    return NightjarConfig(platform="cuda", **options)


PAIR = {"model_path": "/model", "speculative_draft_model_path": "/draft"}


def test_a_gpu_gets_a_fixed_gamma_and_sglangs_worker_unless_more_is_asked_for() -> None:
    assert complete_options(on_gpu(), PAIR)["speculative_num_steps"] == 3
    assert complete_options(on_gpu(policy="static:2"), PAIR)["speculative_num_steps"] == 2
    assert "disable_overlap_schedule" not in complete_options(on_gpu(policy="static:2"), PAIR)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (on_gpu(policy="nightjar"), 5),
        (on_gpu(policy="nightjar", max_gamma=2), 2),
        (on_gpu(elastic="on"), 5),
        (on_gpu(policy="static:2", elastic="on"), 2),
    ],
)
def test_our_worker_on_a_gpu_has_room_for_every_gamma_and_runs_step_by_step(config: NightjarConfig, steps: int) -> None:
    options = complete_options(config, PAIR)
    assert (options["speculative_num_steps"], options["speculative_num_draft_tokens"]) == (steps, steps + 1)
    assert options["disable_overlap_schedule"] is True
    overlapping = msgspec.structs.replace(config, overlap="on")
    for given in ((overlapping, PAIR), (config, {**PAIR, "disable_overlap_schedule": False})):
        assert "overlap scheduling is not supported by Nightjar's own worker on a GPU" in complaint(
            complete_options, *given
        )


def test_elastic_memory_on_a_gpu_only_where_it_is_insisted_on() -> None:
    policy = on_gpu(policy="nightjar", overlap="off")
    assert _settle_elastic(policy, PAIR, on_cpu=False).elastic == "off"
    insisted = msgspec.structs.replace(policy, elastic="on")
    assert _settle_elastic(insisted, PAIR, on_cpu=False).wants_elastic()
    quantized = {**PAIR, "speculative_draft_model_quantization": "fp8"}
    assert "cannot move a draft's fp8 weights on a GPU" in complaint(
        lambda: _settle_elastic(insisted, quantized, on_cpu=False)
    )
    assert "moves a draft, and none is served" in complaint(lambda: _settle_elastic(insisted, {}, on_cpu=False))


@pytest.mark.parametrize(
    ("config", "given", "overlaps"),
    [
        (on_cpu(), {}, False),
        (on_cpu(overlap="on"), {}, True),
        (on_cpu(), {"disable_overlap_schedule": False}, True),  # a keyword of `Engine`; no flag says so
        (on_cpu(overlap="off"), {"disable_overlap_schedule": True}, False),
        (NightjarConfig(platform="cuda"), {}, True),
        (NightjarConfig(platform="cuda"), {"disable_overlap_schedule": True}, False),
        (NightjarConfig(platform="cuda", overlap="off"), {}, False),
    ],
)
def test_overlap_is_off_on_a_cpu_unless_asked_for(
    config: NightjarConfig, given: dict[str, Any], overlaps: bool
) -> None:
    options = complete_options(config, {"model_path": "/model", **given})
    assert options.get("disable_overlap_schedule", "left out") == ("left out" if overlaps else True)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_memory_is_elastic_with_and_without_overlap(overlap: str) -> None:
    assert _settle_elastic(on_cpu(overlap=overlap), PAIR, on_cpu=True).wants_elastic()
    assert _settle_elastic(on_cpu(overlap=overlap, elastic="on"), PAIR, on_cpu=True).wants_elastic()


def test_what_the_user_gave_is_kept() -> None:
    given = {"model_path": "/model", "chunked_prefill_size": 512, "max_running_requests": 7, "dtype": "float"}
    options = complete_options(on_cpu(), given)
    assert {name: options[name] for name in given} == given
    assert complete_options(on_cpu(), {"model_path": "/model", "dtype": "auto"})["dtype"] == "float32"


def test_none_counts_as_not_given(demo: str) -> None:
    assert complete_options(on_cpu(), {"model_path": None})["model_path"] == demo


def test_a_gpu_gets_no_defaults_of_the_cpu(demo: str) -> None:
    options = complete_options(NightjarConfig(platform="cuda"), {})
    assert options["speculative_draft_model_path"] == demo
    assert not {"device", "dtype", "attention_backend", "speculative_draft_model_quantization"} & set(options)


PAIR = {"model_path": "/model", "speculative_draft_model_path": "/draft"}


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (
            on_cpu(policy="static:3"),
            {"model_path": "/m"},
            "static:3 needs a draft; give --speculative-draft-model-path",
        ),
        (on_cpu(policy="off"), PAIR, "never speculates; leave out --speculative-draft-model-path"),
        (on_cpu(policy="off"), {"model_path": "/m", "speculative_num_steps": 2}, "disagree; give one of them"),
        (on_cpu(policy="static:2"), {**PAIR, "speculative_num_steps": 3}, "disagree; give one of them"),
        (on_cpu(overlap="on"), {**PAIR, "disable_overlap_schedule": True}, "disagree; give one of them"),
        (on_cpu(), {**PAIR, "speculative_num_steps": 0}, "choose 1 to --nightjar-max-gamma (5)"),
        (on_cpu(), {**PAIR, "speculative_num_steps": -2}, "--speculative-num-steps is -2"),
        (on_cpu(max_gamma=2), {**PAIR, "speculative_num_steps": 3}, "choose 1 to --nightjar-max-gamma (2)"),
        (on_cpu(), {**PAIR, "speculative_num_draft_tokens": 8}, "leave it out or give 6"),
        (on_cpu(), {"model_path": "/m", "speculative_num_steps": 3}, "has no draft to work on"),
        (on_cpu(), {"model_path": "/m", "speculative_algorithm": "standalone"}, "has no draft to work on"),
        (
            on_cpu(policy="off"),
            {"model_path": "/m", "speculative_draft_model_quantization": "nightjar_w8"},
            "never speculates; leave it out",
        ),
        (on_cpu(draft_bits=4), PAIR, "--speculative-draft-model-quantization nightjar_w4"),
        (on_cpu(draft_bits=4), {"model_path": "/m"}, "--nightjar-draft-bits 4"),
    ],
)
def test_contradictions(config: NightjarConfig, given: dict[str, Any], expected: str) -> None:
    assert expected in complaint(complete_options, config, given)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tp_size": 0}, "--tp-size is 0; choose 1 or more"),
        ({"max_running_requests": 0}, "--max-running-requests is 0"),
        ({"page_size": 0}, "--page-size is 0"),
        ({"page_size": -16}, "--page-size is -16"),
        ({"max_prefill_tokens": -1}, "--max-prefill-tokens is -1"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size is 0; choose a multiple of --page-size (1), or -1"),
        ({"chunked_prefill_size": 100, "page_size": 16}, "choose a multiple of --page-size (16)"),
    ],
)
def test_sizes_on_which_the_scheduler_would_fail(options: dict[str, int], expected: str) -> None:
    assert expected in complaint(check_ranges, options)


def test_sizes_that_work() -> None:
    check_ranges({})
    check_ranges({"page_size": 16, "chunked_prefill_size": 2048, "max_running_requests": 1})
    check_ranges({"chunked_prefill_size": -1})


def test_unsupported_is_refused_before_the_demo_model_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "prepare_demo_model", lambda: pytest.fail("converted"))
    assert "--enable-lora is not supported" in complaint(server_options, on_cpu(), {"enable_lora": True})


# The command line.


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ([], 1),
        (["--tp", "2"], 2),
        (["--tp-size=4"], 4),
        (["--tensor-parallel-size", "3", "--port", "1"], 3),
        (["--port", "8"], 1),
    ],
)
def test_ranks_are_known_before_sglang_is_imported(words: list[str], ranks: int) -> None:
    assert launch_server._ranks(words) == ranks


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", ""])
def test_impossible_ranks(value: str) -> None:
    assert "whole number of ranks" in complaint(launch_server._ranks, [f"--tp-size={value}"])


def test_ranks_from_sglangs_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("tensor-parallel-size: 2\nport: 5\n")
    assert launch_server._ranks(["--config", str(file)]) == 2
    assert launch_server._ranks(["--config", str(file), "--tp", "3"]) == 3
    file.write_text("tp_size: [")
    assert "cannot be read" in complaint(launch_server._ranks, ["--config", str(file)])
    assert "cannot be read" in complaint(launch_server._ranks, ["--config", str(tmp_path / "none.yaml")])


def test_given_options_are_those_on_the_command_line_only(tmp_path: Path) -> None:
    words = ["--model", "/m", "--tp", "2", "--chunked-prefill-size", "-1", "--disable-radix-cache"]
    assert launch_server._given_options(words) == {
        "model_path": "/m",
        "tp_size": 2,
        "chunked_prefill_size": -1,
        "disable_radix_cache": True,
    }
    file = tmp_path / "server.yaml"
    file.write_text("model-path: /m\nport: 5\n")
    assert launch_server._given_options(["--config", str(file), "--port", "6"]) == {"model_path": "/m", "port": 6}


def test_a_configuration_file_that_sglang_would_overlook(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 5\n")
    assert "write it as two words" in complaint(launch_server._given_options, [f"--config={file}"])
    assert "--config:" in complaint(launch_server._given_options, ["--config", str(tmp_path / "none.yaml")])


def test_completed_options_read_back_as_they_were(demo: str) -> None:
    options = complete_options(on_cpu(), {"port": 5})
    words = launch_server._as_words(options, {"port": 5})
    assert "--port" not in words
    parser = argparse.ArgumentParser()
    for name in options:
        switch = options[name] is True
        parser.add_argument("--" + name.replace("_", "-"), **({"action": "store_true"} if switch else {}))
    read = vars(parser.parse_args(words))
    assert {name: str(value) for name, value in options.items() if name != "port"} == {
        name: str(value) for name, value in read.items() if name != "port"
    }


def test_a_port_in_use_is_found_before_loading() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}" in complaint(launch_server._check_address, "127.0.0.1", port)
    launch_server._check_address("127.0.0.1", port)


@pytest.mark.parametrize("port", [0, -1, 70000])
def test_an_impossible_port(port: int) -> None:
    assert "choose a value from 1 to 65535" in complaint(launch_server._check_address, "127.0.0.1", port)


def test_an_impossible_host() -> None:
    # 192.0.2.0/24 is reserved for documentation: no machine has such an address.
    assert "choose another --port or --host" in complaint(launch_server._check_address, "192.0.2.1", 30000)


@pytest.mark.parametrize(
    "words", [["--nightjar-policy", "magic"], ["--nightjar-polcy", "off"], ["--tp-size", "0"], ["--nightjar-threads"]]
)
def test_main_prints_one_line_and_returns_1(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_server.main(words) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
