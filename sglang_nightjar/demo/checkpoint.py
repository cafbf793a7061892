"""Write a float32 Llama checkpoint in the Hugging Face layout, as SGLang and transformers load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer


@dataclass(frozen=True)
class LlamaShape:
    """The sizes and constants of a Llama-architecture decoder; lengths are counted in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool

    def __post_init__(self) -> None:
        assert self.hidden_size % self.heads == 0, f"{self.hidden_size=} not divisible by {self.heads=}"
        assert self.heads % self.kv_heads == 0, f"{self.heads=} not divisible by {self.kv_heads=}"
        assert self.head_dim % 2 == 0, f"rotary embedding needs an even head_dim, not {self.head_dim}"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must have, by its Hugging Face name; matrices are [out, in]."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "self_attn.q_proj.weight": (hidden, hidden),
                prefix + "self_attn.k_proj.weight": (kv, hidden),
                prefix + "self_attn.v_proj.weight": (kv, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, hidden),
                prefix + "post_attention_layernorm.weight": (hidden,),
                prefix + "mlp.gate_proj.weight": (inner, hidden),
                prefix + "mlp.up_proj.weight": (inner, hidden),
                prefix + "mlp.down_proj.weight": (hidden, inner),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


@dataclass(frozen=True)
class TextRules:
    """How text becomes tokens: the tokenizer, its special tokens and the chat template (Jinja)."""

    tokenizer: Tokenizer
    bos: str
    eos: str
    pad: str
    unk: str
    chat_template: str

    def token_id(self, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return int(number)

    def special_ids(self) -> dict[str, int]:
        """`bos_token_id`, `eos_token_id` and `pad_token_id`, as config files spell them."""
        return {
            "bos_token_id": self.token_id(self.bos),
            "eos_token_id": self.token_id(self.eos),
            "pad_token_id": self.token_id(self.pad),
        }


def write_checkpoint(folder: Path, shape: LlamaShape, tensors: Mapping[str, np.ndarray], text: TextRules) -> None:
    """Write the checkpoint's five files into the existing `folder`.

    Raises:
        ValueError: a tensor is missing, unexpected, not float32 or of another shape than `shape` says.
    """
    expected = shape.tensor_shapes()
    if odd := sorted(expected.keys() ^ tensors.keys()):
        raise ValueError(f"{len(odd)} tensors missing or unexpected, the first is {odd[0]!r}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name] or tensor.dtype != np.float32:
            raise ValueError(f"{name} is {tensor.dtype} {tensor.shape}, expected float32 {expected[name]}")

    _write_json(folder / "config.json", config_json(shape, text))
    _write_json(folder / "generation_config.json", text.special_ids())
    _write_json(folder / "tokenizer_config.json", tokenizer_config_json(shape, text))
    text.tokenizer.save(str(folder / "tokenizer.json"))
    # transformers refuses a file that does not name its framework.
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def config_json(shape: LlamaShape, text: TextRules) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.rms_norm_eps,
        # transformers 5 and SGLang read rope_parameters; older readers only know rope_theta.
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **text.special_ids(),
    }


def tokenizer_config_json(shape: LlamaShape, text: TextRules) -> dict[str, Any]:
    """The content of `tokenizer_config.json`."""
    return {
        # Takes tokenizer.json as it stands; the model-specific classes rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text.bos,
        "eos_token": text.eos,
        "pad_token": text.pad,
        "unk_token": text.unk,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context_length,
        "chat_template": text.chat_template,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
