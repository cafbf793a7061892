"""The folder SGLang starts an emulated model from: a configuration and a tokenizer, no weights to speak of."""

import json
from enum import Enum
from pathlib import Path
from typing import Any

from sglang_nightjar.demo.cache import build_once, cache_root
from sglang_nightjar.demo.smollm2 import print_progress
from sglang_nightjar.emulate.scale import scaled
from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.roofline import SetUp

VERSION = 1
"""Raise this whenever the written files would change."""

ARCHITECTURE = "EmulatedForCausalLM"  # the class's name in `model.py`
LONGEST = 131_072  # tokens of a sequence; no set-up has room for more
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class Role(str, Enum):
    """Which of a set-up's two models."""

    TARGET = "target"
    DRAFT = "draft"


def prepare_checkpoint(set_up: SetUp, role: Role, cache: Path | None = None) -> Path:
    """The model's folder in the cache, written if need be.

    Args:
        cache: `cache_root()` if None.
    Raises:
        UserError: the cache cannot be written, or the model cannot be scaled.
    """
    size = scaled(set_up.target if role is Role.TARGET else set_up.draft)
    root = cache if cache is not None else cache_root()
    # Sizes are in the name: a set-up may change without its name changing.
    name = f"{set_up.name}-{role.value}-{size.weights}x{size.row}-v{VERSION}"
    try:
        return build_once(
            root / "models" / "emulated" / name, lambda empty: _write(empty, set_up, role), print_progress
        )
    except OSError as error:
        raise UserError(
            f"cannot keep the emulated model in {root}: {error}; set NIGHTJAR_CACHE to a folder you can write to"
        ) from error


def _write(folder: Path, set_up: SetUp, role: Role) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from sglang_nightjar.emulate.vocabulary import emulated_tokenizer

    _write_json(folder / "config.json", config_json(set_up, role))
    _write_json(folder / "generation_config.json", _special_ids())
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": LONGEST,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    emulated_tokenizer().save(str(folder / "tokenizer.json"))
    # SGLang's loader wants a file of weights; the model makes its own.
    save_file({"nothing": np.zeros(1, np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})


def config_json(set_up: SetUp, role: Role) -> dict[str, Any]:
    """The content of `config.json`: a Llama of one layer to whoever asks for sizes, with three entries of ours."""
    from sglang_nightjar.emulate.vocabulary import VOCABULARY

    size = scaled(set_up.target if role is Role.TARGET else set_up.draft)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(VOCABULARY),
        "hidden_size": size.row,
        "intermediate_size": size.row,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": size.row,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": False,
        "nightjar_set_up": set_up.name,
        "nightjar_role": role.value,
        "nightjar_weights": size.weights,
        **_special_ids(),
    }


def _special_ids() -> dict[str, int]:
    from sglang_nightjar.emulate.vocabulary import SPECIALS

    end = SPECIALS.index("</s>")
    return {"bos_token_id": SPECIALS.index("<s>"), "eos_token_id": end, "pad_token_id": end}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
