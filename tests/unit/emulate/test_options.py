"""From a set-up's name to what SGLang is started with, and what contradicts it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_nightjar.config import NightjarConfig, load_config
from sglang_nightjar.emulate import options as module
from sglang_nightjar.emulate.checkpoint import Role, prepare_checkpoint
from sglang_nightjar.emulate.scale import budget_bytes, scaled
from sglang_nightjar.emulate.vocabulary import FIRST, VOCABULARY
from sglang_nightjar.errors import UserError
from sglang_nightjar.serving.options import complete_options
from sglang_nightjar.simulate.setups import SET_UPS

NAME = "4090-r1-qwen-7b"
SET_UP = SET_UPS[NAME]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTJAR_CACHE", str(tmp_path))


def config(**options: Any) -> NightjarConfig:
    return NightjarConfig(**{"platform": "cpu", "emulate": NAME, **options})


def emulated(given: dict[str, Any], **options: Any) -> tuple[NightjarConfig, dict[str, Any]]:
    own = config(**options)
    return module.emulated_options(own, module.find(own), given)


def test_the_command_line() -> None:
    words = ["--nightjar-emulate", NAME, "--nightjar-emulate-speed", "0.1", "--nightjar-emulate-acceptance", "0.4"]
    parsed, rest = load_config(words, {})
    assert (parsed.emulate, parsed.emulate_speed, parsed.emulate_acceptance, rest) == (NAME, 0.1, "0.4", [])


@pytest.mark.parametrize("name", SET_UPS)
def test_every_set_up_with_its_draft(name: str) -> None:
    settled, options = emulated({}, emulate=name)
    set_up = SET_UPS[name]
    assert options["max_total_tokens"] == set_up.slots(True)
    assert settled.device_bytes() == budget_bytes(set_up)
    for key, model in (("model_path", set_up.target), ("speculative_draft_model_path", set_up.draft)):
        written = json.loads((Path(options[key]) / "config.json").read_text())
        size = scaled(model)
        assert (written["head_dim"], written["nightjar_weights"]) == (size.row, size.weights)


def test_without_speculation_there_is_no_draft_and_its_room_is_kv() -> None:
    _, options = emulated({}, policy="off")
    assert "speculative_draft_model_path" not in options
    assert options["max_total_tokens"] == SET_UP.slots(False) > SET_UP.slots(True)


def test_pages_and_what_the_user_gave() -> None:
    _, options = emulated({"page_size": 16, "max_running_requests": 32, "context_length": 4096, "tp_size": 1})
    assert options["max_total_tokens"] == SET_UP.slots(True) // 16 * 16
    assert (options["max_running_requests"], options["context_length"]) == (32, 4096)


def test_what_is_completed_goes_through_the_usual_way() -> None:
    settled, options = emulated({}, policy="static:2")
    complete = complete_options(settled, options)
    assert complete["speculative_num_steps"] == 2 and complete["attention_backend"] == "nightjar_cpu"


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({}, {"emulate": "5090"}, "'5090' is unknown; use one of: 4090-r1-qwen-7b"),
        ({}, {"platform": "cuda"}, "runs on the CPU platform"),
        ({}, {"device_memory": "2GiB"}, "the set-up names its memory"),
        ({}, {"draft_bits": 4}, "leave it out with --nightjar-emulate"),
        ({}, {"emulate_acceptance": "2"}, "choose a value from 0 to 1"),
        ({"model_path": "/model"}, {}, "--model-path /model: the set-up names its models"),
        ({"tp_size": 2}, {}, "--tp-size 2: one process costs what all GPUs"),
        ({"mem_fraction_static": 0.5}, {}, "--mem-fraction-static 0.5: the set-up names its memory"),
        ({"max_total_tokens": 10**6}, {}, f"has room for {SET_UP.slots(True)}: choose less"),
    ],
)
def test_mistakes(given: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        emulated(given, **options)
    assert message in str(raised.value)


def test_a_speed_out_of_range() -> None:
    with pytest.raises(UserError, match="--nightjar-emulate-speed is 0"):
        config(emulate_speed=0.0)


def test_the_tokenizer_takes_a_character_for_a_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepare_checkpoint(SET_UP, Role.TARGET))
    assert len(tokenizer) == len(VOCABULARY)
    text = "Two  spaces, a\nnew line and <domain3> ü."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) - len("<domain3>") + 1 and tokenizer.decode(ids) == text
    every = list(range(FIRST, len(VOCABULARY)))
    assert tokenizer.encode(tokenizer.decode(every)) == every, "random ids keep their number as text"
    assert tokenizer.encode("漢") == [0]
    turn = {"role": "user", "content": "hi"}
    chat = tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    assert chat == "user: hi\nassistant: "
