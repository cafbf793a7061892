"""Convert a GGUF file of a SmolLM model into a float32 Hugging Face checkpoint.

GGUF is llama.cpp's file format: metadata, tokenizer and quantized tensors in one file. Reading and
dequantizing are the `gguf` package's work (a dependency of SGLang); what is left to do here is to give
each tensor its Hugging Face name, to undo the row order llama.cpp wants for q and k, and to put the
tokenizer together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_nightjar.demo.cache import Progress
from sglang_nightjar.demo.checkpoint import LlamaShape, TextRules, write_checkpoint

_WHOLE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PROGRESS_LINES = 4


def convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write the model of `gguf_file` into the existing `folder` as a float32 checkpoint.

    Raises:
        ValueError: the file's architecture or tokenizer is not the one this converter knows.
    """
    reader = GGUFReader(gguf_file)
    shape = read_shape(reader)
    text = read_text_rules(reader)
    tensors = read_tensors(reader, shape, progress)
    parameters = sum(tensor.size for tensor in tensors.values())
    progress(f"writing {parameters / 1e6:.1f} million float32 parameters ({parameters * 4 / 1e6:.0f} MB)")
    write_checkpoint(folder, shape, tensors, text)


def read_shape(reader: GGUFReader) -> LlamaShape:
    """The model's sizes and constants from the file's metadata."""
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds a {architecture!r} model, not a 'llama' one")
    return LlamaShape(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        layers=_field(reader, "llama.block_count"),
        heads=_field(reader, "llama.attention.head_count"),
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        context_length=_field(reader, "llama.context_length"),
        rope_theta=float(_field(reader, "llama.rope.freq_base")),
        rms_norm_eps=_shortest(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        tied_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )


def read_tensors(reader: GGUFReader, shape: LlamaShape, progress: Progress) -> dict[str, np.ndarray]:
    """Every tensor in float32 under its Hugging Face name; matrices are [out, in]."""
    tensors: dict[str, np.ndarray] = {}
    total = len(reader.tensors)
    for count, stored in enumerate(reader.tensors, start=1):
        tensor = dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
        if stored.name.endswith("attn_q.weight"):
            tensor = _split_halves(tensor, shape.heads)
        elif stored.name.endswith("attn_k.weight"):
            tensor = _split_halves(tensor, shape.kv_heads)
        tensors[hf_name(stored.name)] = tensor
        if count * _PROGRESS_LINES // total > (count - 1) * _PROGRESS_LINES // total:
            progress(f"dequantized {count} of {total} tensors")
    return tensors


def hf_name(gguf_name: str) -> str:
    """A tensor's Hugging Face name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    match gguf_name.split("."):
        case [whole, "weight"] if whole in _WHOLE_MODEL:
            return f"{_WHOLE_MODEL[whole]}.weight"
        case ["blk", layer, part, "weight"] if layer.isdecimal() and part in _PER_LAYER:
            return f"model.layers.{layer}.{_PER_LAYER[part]}.weight"
    raise ValueError(f"the GGUF file has a tensor this converter does not know: {gguf_name!r}")


def read_text_rules(reader: GGUFReader) -> TextRules:
    """The tokenizer with its special tokens and the chat template."""
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kinds != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file's tokenizer is {kinds}, not byte-level BPE ('gpt2', 'smollm')")

    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # What llama.cpp calls "smollm": every digit stands alone, then GPT-2's byte-level splitting.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

    def special(role: str) -> str:
        return tokens[_field(reader, f"tokenizer.ggml.{role}_token_id")]

    return TextRules(
        tokenizer=tokenizer,
        bos=special("bos"),
        eos=special("eos"),
        pad=special("padding"),
        unk=special("unknown"),
        chat_template=_field(reader, "tokenizer.chat_template"),
    )


def _split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    # llama.cpp rotates neighbouring rows of a head (0,1), (2,3), ...; Hugging Face rotates row i with
    # row i + head_dim / 2. So the even rows of each head go to its first half, the odd ones to its second.
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3).reshape(rows.shape))


def _shortest(value: float) -> float:
    # GGUF keeps 1e-05 as a float32, which reads back as 9.99999975e-06; numpy prints the short name again.
    return float(str(np.float32(value)))


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no metadata field {key!r}")
    return field.contents()
