"""Model folders are looked at before anything is loaded: damage, misfits and memory are one-line errors."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tiny_model import make_tiny_model

from sglang_nightjar.errors import UserError
from sglang_nightjar.serving import checkpoints, memory
from sglang_nightjar.serving.checkpoints import check_checkpoints, check_vocabularies
from sglang_nightjar.serving.memory import ModelShape, available_memory, plan_memory

GIB = 2**30


def complaint(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(UserError) as raised:
        call(*arguments)
    return str(raised.value)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("checkpoints") / "target")


@pytest.fixture
def copy(target: Path, tmp_path: Path) -> Path:
    """A copy of the target for a test to damage."""
    return Path(shutil.copytree(target, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def pair(target: Path, draft: Path, **options: Any) -> dict[str, Any]:
    return {"model_path": str(target), "speculative_draft_model_path": str(draft), **options}


def test_a_good_pair_is_planned(target: Path) -> None:
    planned = check_checkpoints(pair(target, target))
    assert planned["max_total_tokens"] == 32768
    assert 0.9 < planned["mem_fraction_static"] < 1


def test_the_shape_of_a_checkpoint(target: Path) -> None:
    shape = checkpoints._inspect("--model-path", target, {})
    # 2 layers of K and V, 2 heads of 16 channels, float32
    assert shape.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (shape.heads, shape.kv_heads, shape.context_len, shape.vocab_size) == (4, 2, 2048, 128)
    assert shape.weight_bytes == (target / "model.safetensors").stat().st_size - _header(target)


def _header(folder: Path) -> int:
    """Bytes before the tensors in a safetensors file: a length, and a JSON of that length."""
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: shutil.rmtree(folder), "no such folder; give a folder with a Hugging Face checkpoint"),
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text('{"a":'), "config.json cannot be read"),
        (lambda folder: change_config(folder, model_type="nonesuch"), "config.json cannot be read"),
        (lambda folder: change_config(folder, hidden_size="wide"), "config.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "*.safetensors is missing"),
        (lambda folder: _truncate(folder / "model.safetensors", 0.5), "model.safetensors is damaged"),
        (lambda folder: _truncate(folder / "model.safetensors", 0.0), "model.safetensors is damaged"),
        (lambda folder: _index(folder, "model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors is miss"),
        (lambda folder: change_config(folder, quantization_config={"quant_method": "awq"}), "quantized weights"),
    ],
    ids=["gone", "no-config", "broken-config", "unknown", "mistyped", "no-weights", "cut", "empty", "shard", "awq"],
)
def test_damage(role: str, damage: Callable[[Path], Any], expected: str, target: Path, copy: Path) -> None:
    damage(copy)
    options = pair(copy, target) if role == "target" else pair(target, copy)
    message = complaint(check_checkpoints, options)
    flag = "--model-path" if role == "target" else "--speculative-draft-model-path"
    assert message.startswith(f"{flag} {copy}: ")
    assert expected in message
    assert len(message) < 400


def _truncate(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


def _index(folder: Path, *names: str) -> None:
    files = {f"tensor{number}": name for number, name in enumerate(("model.safetensors", *names))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"num_local_experts": 8}, "a mixture of experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear attention"),
    ],
)
def test_models_of_another_kind(changes: Mapping[str, Any], kind: str, copy: Path) -> None:
    change_config(copy, **changes)
    message = complaint(check_checkpoints, {"model_path": str(copy)})
    assert f"a model with {kind} is not served on a CPU" in message


def test_another_vocabulary(target: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft", vocab_size=200)
    message = complaint(check_checkpoints, pair(target, draft))
    assert "has another vocabulary" in message
    assert "(200 and 128 tokens); use a draft made for this tokenizer" in message


def test_the_same_size_of_vocabulary_is_not_enough(target: Path, copy: Path) -> None:
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    assert "has another vocabulary" in complaint(check_checkpoints, pair(target, copy))


def test_on_a_gpu_only_the_vocabularies_are_compared(target: Path, tmp_path: Path) -> None:
    check_vocabularies(pair(target, target))
    check_vocabularies(pair(target, make_tiny_model(tmp_path / "padded", padded_vocab_size=160)))
    other = make_tiny_model(tmp_path / "other", vocab_size=64)
    assert "another vocabulary" in complaint(check_vocabularies, pair(target, other))


def test_padded_sizes_may_differ(target: Path, tmp_path: Path) -> None:
    padded = make_tiny_model(tmp_path / "padded", padded_vocab_size=160)
    check_checkpoints(pair(target, padded))
    check_checkpoints(pair(padded, target))


def test_a_draft_without_a_tokenizer(target: Path, copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    message = complaint(check_checkpoints, pair(target, copy))
    assert "the draft's tokenizer" in message
    assert "copy the target's tokenizer files" in message


def test_a_tokenizer_of_its_own_path(target: Path, copy: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(copy, tmp_path / "draft"))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    check_checkpoints(pair(copy, draft, tokenizer_path=str(target)))


def test_context(target: Path, tmp_path: Path) -> None:
    short = make_tiny_model(tmp_path / "short", context_length=512)
    assert "give --context-length 512 or less" in complaint(check_checkpoints, pair(target, short))
    check_checkpoints(pair(target, short, context_length=512))
    check_checkpoints(pair(short, target))
    for length in (0, -1, 2049):
        message = complaint(check_checkpoints, {"model_path": str(target), "context_length": length})
        assert f"--context-length is {length}; this model supports 1 to 2048" in message


def test_ranks_must_divide_both_models(target: Path, tmp_path: Path) -> None:
    check_checkpoints(pair(target, target, tp_size=2))
    message = complaint(check_checkpoints, pair(target, target, tp_size=3))
    assert "--tp-size 3 does not divide this model (4 attention heads, 2 KV heads, 128 inner channels)" in message
    assert message.endswith("use one of: 1, 2, 4")
    odd = make_tiny_model(tmp_path / "odd", hidden=48, heads=3, kv_heads=3)
    assert "use one of: 1" in complaint(check_checkpoints, pair(target, odd, tp_size=2))


def test_overrides_of_the_configuration(target: Path) -> None:
    options = {"model_path": str(target), "json_model_override_args": '{"num_hidden_layers": 1}'}
    assert checkpoints._inspect("--model-path", target, options).kv_bytes_per_token == 2 * 2 * 16 * 4
    options["json_model_override_args"] = "{nope"
    assert "--json-model-override-args is not valid JSON" in complaint(check_checkpoints, options)


def test_a_name_on_the_hub(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(name: str, **options: Any) -> str:
        asked.append((name, options["revision"]))
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    check_checkpoints({"model_path": "owner/model", "revision": "abc"})
    assert asked == [("owner/model", "abc")]


def test_a_name_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, **options: Any) -> str:
        raise ConnectionError("offline\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    message = complaint(check_checkpoints, {"model_path": "owner/model"})
    assert message.startswith("--model-path owner/model: no such folder, and Hugging Face's hub does not give it")
    assert "(offline)" in message


# Memory. One token of KV cache in `SMALL` takes 1 KiB, its weights 1 GiB.

SMALL = ModelShape(
    context_len=2048,
    vocab_size=128,
    heads=4,
    kv_heads=2,
    intermediate_size=128,
    kv_bytes_per_token=1024,
    weight_bytes=GIB,
)


def test_a_pool_of_the_default_size_where_memory_permits() -> None:
    assert plan_memory({}, [SMALL], 8 * GIB)["max_total_tokens"] == 32768


def test_a_smaller_pool_in_little_memory() -> None:
    # Two copies of the target's weights and the draft's leave 20 MiB; half of them, at 2 KiB a token.
    planned = plan_memory({"page_size": 16}, [SMALL, SMALL], 3 * GIB + 20 * 2**20)
    assert planned["max_total_tokens"] == 20 * 1024 // 2 // 2


def test_the_pool_is_whole_pages() -> None:
    planned = plan_memory({"page_size": 48}, [SMALL], 2 * GIB + 1000 * 1024)
    assert planned["max_total_tokens"] == 480  # the largest multiple of 48 up to half of 960


def test_a_given_fraction_is_of_the_free_memory_weights_included() -> None:
    planned = plan_memory({"mem_fraction_static": 0.5}, [SMALL], 6 * GIB)
    assert planned["max_total_tokens"] == GIB // 1024


def test_a_given_number_of_tokens_is_taken() -> None:
    assert plan_memory({"max_total_tokens": 4096}, [SMALL], 8 * GIB)["max_total_tokens"] == 4096


@pytest.mark.parametrize(
    ("options", "available", "expected"),
    [
        ({"mem_fraction_static": 0.0}, 8, "--mem-fraction-static is 0.0; choose a value between 0 and 1"),
        ({"mem_fraction_static": 1.5}, 8, "--mem-fraction-static is 1.5; choose a value between 0 and 1"),
        ({"mem_fraction_static": -1.0}, 8, "--mem-fraction-static is -1.0; choose a value between 0 and 1"),
        ({"mem_fraction_static": float("nan")}, 8, "--mem-fraction-static is nan"),
        ({"mem_fraction_static": 0.1}, 8, "--mem-fraction-static 0.1 allows 0.8 GiB; raise it"),
        ({"max_total_tokens": 0}, 8, "--max-total-tokens is 0; choose at least 128"),
        ({"max_total_tokens": -5}, 8, "--max-total-tokens is -5; choose at least 128"),
        ({"max_total_tokens": 128, "page_size": 64}, 8, "choose at least 256"),
        ({"max_total_tokens": 10**15}, 8, "6.0 GiB are left after the weights; choose at most 6291456"),
        ({"max_total_tokens": 2**21, "mem_fraction_static": 0.3}, 8, "choose at most 419430"),
        ({}, 1, "the models and 128 tokens of KV cache need 2.0 GiB of memory, 1.0 GiB are left for them; use"),
    ],
)
def test_impossible_sizes(options: dict[str, Any], available: int, expected: str) -> None:
    assert expected in complaint(plan_memory, options, [SMALL], available * GIB)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    machine = available_memory(tmp_path / "none")
    assert machine > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert available_memory(tmp_path) > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory(tmp_path) == 300
    (tmp_path / "memory.current").write_text("1200\n")
    assert available_memory(tmp_path) == 0


def test_what_is_free_is_asked_of_this_machine(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what SGLang's own processes take: two with one rank, three with two."""
    monkeypatch.setattr(checkpoints, "available_memory", lambda: 2 * GIB)
    assert "0.0 GiB are left" in complaint(check_checkpoints, {"model_path": str(target)})
    monkeypatch.setattr(checkpoints, "available_memory", lambda: 3 * GIB)
    check_checkpoints({"model_path": str(target)})
    assert "0.0 GiB are left" in complaint(check_checkpoints, {"model_path": str(target), "tp_size": 2})
    assert memory.available_memory() > 1000
