"""Looks at the model folders before anything is started: readable, supported, fitting together."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_nightjar.errors import UserError
from sglang_nightjar.platform.names import QUANTIZATION
from sglang_nightjar.serving.memory import ModelShape, available_memory, plan_memory

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # what Hugging Face's hub calls a model: owner/name
_PROCESS_BYTES = 2**30  # what each process SGLang starts takes beside models and KV cache (measured: 1.0 GB)
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def check_checkpoints(options: Mapping[str, Any], device_bytes: int | None = None) -> dict[str, Any]:
    """Checks target and draft, and returns the memory options to set.

    Args:
        options: completed `ServerArgs` fields.
        device_bytes: as in `plan_memory`.
    Raises:
        UserError: a checkpoint is missing or damaged, of a kind a CPU does not serve, the two do not fit
            together, or memory is too small.
    """
    target_path, draft_path = options["model_path"], options.get("speculative_draft_model_path")
    target_folder = _folder("--model-path", target_path, options.get("revision"))
    shapes = [_inspect("--model-path", target_folder, options)]
    if draft_path:
        flag = "--speculative-draft-model-path"
        draft_folder = _folder(flag, draft_path, options.get("speculative_draft_model_revision"))
        shapes.append(shapes[0] if draft_folder == target_folder else _inspect(flag, draft_folder, options))
        if draft_folder != target_folder:
            _check_tokenizers(Path(options.get("tokenizer_path") or target_folder), draft_folder, options)
    _check_context(options, shapes)
    ranks = options.get("tp_size", 1)
    for shape in shapes:
        _check_ranks(ranks, shape)
    processes = (ranks + 1) * _PROCESS_BYTES  # one per rank, and the detokenizer
    if len(shapes) == 2:
        bits = QUANTIZATION.get(options.get("speculative_draft_model_quantization") or "")
        shapes[1] = msgspec.structs.replace(shapes[1], weight_bytes=int(shapes[1].weight_bytes * _draft_share(bits)))
    return plan_memory(options, shapes, max(0, available_memory() - processes), device_bytes)


def check_vocabularies(options: Mapping[str, Any]) -> None:
    """Checks that target and draft have the same tokens, and nothing else: on a GPU the rest is SGLang's to check.

    SGLang's own worker checks it too, but refuses vocabularies padded to two sizes, which ours takes.

    Raises:
        UserError: they have not, or a tokenizer cannot be read.
    """
    target = _folder("--model-path", options["model_path"], options.get("revision"))
    draft = _folder(
        "--speculative-draft-model-path",
        options["speculative_draft_model_path"],
        options.get("speculative_draft_model_revision"),
    )
    if draft != target:
        _check_tokenizers(Path(options.get("tokenizer_path") or target), draft, options)


def _draft_share(bits: int | None) -> float:
    """Bytes of a draft over those of its float32 weights: int8 with one scale per row or per 64 inputs, or, not
    quantized, the plain weights and their prepacked copy."""
    if bits is None:
        return 2.0
    return 0.26 if bits > 4 else 0.32


def _folder(flag: str, path: str, revision: str | None) -> Path:
    """Where the checkpoint is on this machine; one that is only named is fetched from Hugging Face's hub."""
    if Path(path).is_dir():
        return Path(path)
    if not _HUB_NAME.fullmatch(path):
        raise UserError(f"{flag} {path}: no such folder; give a folder with a Hugging Face checkpoint")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # offline, unknown, private, full disk: the hub has an exception for each
        raise UserError(
            f"{flag} {path}: no such folder, and Hugging Face's hub does not give it ({_first_line(error)}); "
            "give a folder with a checkpoint"
        ) from None


def _inspect(flag: str, folder: Path, options: Mapping[str, Any]) -> ModelShape:
    from sglang.srt.utils.hf_transformers.common import get_context_length
    from sglang.srt.utils.hf_transformers.config import get_config

    try:
        overrides = json.loads(options.get("json_model_override_args") or "{}")
    except ValueError as error:
        raise UserError(f"--json-model-override-args is not valid JSON: {error}; give a JSON object") from None
    try:
        config = get_config(
            str(folder),
            trust_remote_code=bool(options.get("trust_remote_code", False)),
            model_override_args=overrides,
        )
        text = config.get_text_config()
        _check_kind(flag, folder, config, text)
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return ModelShape(
            context_len=get_context_length(text),
            vocab_size=text.vocab_size,
            heads=heads,
            kv_heads=kv_heads,
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            kv_bytes_per_token=text.num_hidden_layers * 2 * kv_heads * head_dim * 4,
            weight_bytes=_count_parameters(flag, folder) * 4,
        )
    except UserError:
        raise
    except Exception as error:  # a foreign file: there is no list of what transformers raises for it
        raise UserError(
            f"{flag} {folder}: config.json cannot be read ({_first_line(error)}); give a complete checkpoint"
        ) from None


def _check_kind(flag: str, folder: Path, config: Any, text: Any) -> None:
    """A CPU serves dense decoders with ordinary attention, from unquantized weights."""
    refused = {
        "quantized weights": getattr(config, "quantization_config", None),
        "latent attention": getattr(text, "kv_lora_rank", None),
        "a mixture of experts": getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None),
        "state-space layers": getattr(text, "state_size", None) or getattr(text, "mamba_d_state", None),
        "linear attention": "linear_attention" in (getattr(text, "layer_types", None) or []),
        "an encoder": getattr(config, "is_encoder_decoder", False) or getattr(config, "vision_config", None),
    }
    found = next((kind for kind, value in refused.items() if value), None)
    if found is not None:
        raise UserError(
            f"{flag} {folder}: a model with {found} is not served on a CPU; use a dense, unquantized decoder"
        )


def _count_parameters(flag: str, folder: Path) -> int:
    from safetensors import SafetensorError, safe_open

    elements = 0
    for file in _weight_files(flag, folder):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    elements += math.prod(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{flag} {folder}: {file.name} is damaged ({_first_line(error)}); copy it again") from None
    return elements


def _weight_files(flag: str, folder: Path) -> list[Path]:
    """The weight files, those the index names where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()] or ([] if files else ["*.safetensors"])
    if missing:
        raise UserError(f"{flag} {folder}: {missing[0]} is missing; give a complete checkpoint")
    return files


def _check_tokenizers(target: Path, draft: Path, options: Mapping[str, Any]) -> None:
    """Padded sizes may differ, but every token must mean the same to both models."""
    first = _vocabulary("target", target, options, "give a complete checkpoint or --tokenizer-path")
    second = _vocabulary("draft", draft, options, "copy the target's tokenizer files if it was trained with them")
    if first != second:
        raise UserError(
            f"the draft {draft} has another vocabulary than the target {target} "
            f"({len(second)} and {len(first)} tokens); use a draft made for this tokenizer"
        )


def _vocabulary(role: str, folder: Path, options: Mapping[str, Any], remedy: str) -> dict[str, int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=bool(options.get("trust_remote_code", False))
        )
        return dict(tokenizer.get_vocab())
    except Exception as error:  # as for the configuration
        raise UserError(f"the {role}'s tokenizer in {folder} cannot be read ({_first_line(error)}); {remedy}") from None


def _check_context(options: Mapping[str, Any], shapes: list[ModelShape]) -> None:
    given = options.get("context_length")
    length = shapes[0].context_len if given is None else given
    if not 1 <= length <= shapes[0].context_len:
        raise UserError(f"--context-length is {length}; this model supports 1 to {shapes[0].context_len}")
    if length > shapes[-1].context_len:
        raise UserError(
            f"the draft supports {shapes[-1].context_len} tokens and the target {length}; "
            f"give --context-length {shapes[-1].context_len} or less"
        )


def _check_ranks(ranks: int, shape: ModelShape) -> None:
    if _divisible(ranks, shape):
        return
    possible = [str(size) for size in range(1, shape.heads + 1) if _divisible(size, shape)]
    raise UserError(
        f"--tp-size {ranks} does not divide this model ({shape.heads} attention heads, {shape.kv_heads} KV heads, "
        f"{shape.intermediate_size} inner channels); use one of: {', '.join(possible)}"
    )


def _divisible(ranks: int, shape: ModelShape) -> bool:
    kv_fits = shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0
    return shape.heads % ranks == 0 and kv_fits and shape.intermediate_size % ranks == 0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
