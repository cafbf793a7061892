"""Looks at the model folders before anything is started: readable, fitting together, fitting in memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_nightjar.errors import UserError

_POOL_TOKENS = 32768  # KV slots the CPU platform takes when nothing is said, memory permitting
_POOL_SHARE = 0.5  # share of the memory left after weights that they may take then


class ModelShape(msgspec.Struct, frozen=True):
    """What memory planning needs of a checkpoint. Bytes are per rank of one."""

    context_len: int
    vocab_size: int
    kv_bytes_per_token: int
    weight_bytes: int


def check_checkpoints(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks target and draft, and returns the memory options to add.

    Raises:
        UserError: a checkpoint is missing or damaged, the vocabularies differ, or memory is too small.
    """
    shapes = [_inspect("--model-path", options["model_path"])]
    draft_path = options.get("speculative_draft_model_path")
    if draft_path:
        shapes.append(_inspect("--speculative-draft-model-path", draft_path))
        if draft_path != options["model_path"]:
            _check_tokenizers(options["model_path"], draft_path)
    _check_context(options, shapes[0])
    return _plan_memory(options, shapes)


def _inspect(flag: str, path: str) -> ModelShape:
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig

    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{flag} {path}: no such folder; give a folder with a Hugging Face checkpoint")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{flag} {path}: config.json cannot be read ({_first_line(error)})") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{flag} {path}: no *.safetensors file in it; give a complete checkpoint")
    elements = 0
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    elements += size
        except (SafetensorError, OSError) as error:
            raise UserError(f"{flag} {path}: {file.name} is damaged ({_first_line(error)}); copy it again") from None
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return ModelShape(
        context_len=text.max_position_embeddings,
        vocab_size=text.vocab_size,
        kv_bytes_per_token=text.num_hidden_layers * 2 * kv_heads * head_dim * 4,
        weight_bytes=elements * 4,
    )


def _check_tokenizers(target: str, draft: str) -> None:
    from transformers import AutoTokenizer

    try:
        vocabularies = [AutoTokenizer.from_pretrained(path).get_vocab() for path in (target, draft)]
    except (OSError, ValueError) as error:
        raise UserError(f"a tokenizer of the pair cannot be read ({_first_line(error)})") from None
    if vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"the draft {draft} has another vocabulary than the target {target} "
            f"({len(vocabularies[1])} and {len(vocabularies[0])} tokens); use a draft made for this tokenizer"
        )


def _check_context(options: Mapping[str, Any], target: ModelShape) -> None:
    length = options.get("context_length")
    if length is not None and not 1 <= length <= target.context_len:
        raise UserError(f"--context-length is {length}; this model supports 1 to {target.context_len}")


def _plan_memory(options: Mapping[str, Any], shapes: list[ModelShape]) -> dict[str, Any]:
    import psutil

    fraction = options.get("mem_fraction_static")
    tokens = options.get("max_total_tokens")
    page = options.get("page_size") or 1
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise UserError(f"--mem-fraction-static is {fraction}; choose a value between 0 and 1, for example 0.8")
    if tokens is not None and tokens < max(page, 2):
        raise UserError(f"--max-total-tokens is {tokens}; it must hold at least one page of {max(page, 2)} tokens")

    available = psutil.virtual_memory().available
    # Prepacking keeps a second copy of the target's weights for a moment of its life.
    weights = 2 * shapes[0].weight_bytes + sum(shape.weight_bytes for shape in shapes[1:])
    per_token = sum(shape.kv_bytes_per_token for shape in shapes)
    free = available - weights
    if free <= 0:
        raise UserError(
            f"the weights need {_gib(weights)} and {_gib(available)} of memory are free; use a smaller model"
        )
    if tokens is not None:
        if tokens * per_token > free:
            raise UserError(
                f"--max-total-tokens {tokens} needs {_gib(tokens * per_token)} of KV cache and {_gib(free)} are left "
                f"after the weights; choose at most {free // per_token}"
            )
        return {}
    if fraction is not None:
        return {}
    return {"max_total_tokens": max(page, min(_POOL_TOKENS, int(free * _POOL_SHARE) // per_token) // page * page)}


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
