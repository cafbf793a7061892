"""A tiny random Llama for tests that need a real checkpoint but no sense in its text.

Its next-token distributions are neither flat nor peaked, so that sampled tokens can be compared by a
chi-square test, and they depend on the whole context, so that a wrong KV entry shows.
"""

from __future__ import annotations

import math
import string
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_nightjar.demo.checkpoint import LlamaShape, TextRules, write_checkpoint

_SPECIALS = ("<unk>", "<s>", "</s>")
# The order in which characters get a token; a small vocabulary ends early.
_CHARACTERS = string.ascii_lowercase + " \n" + string.digits + ".,:;!?'\"-_()[]{}/+*=<>@" + string.ascii_uppercase
_MIN_VOCAB = len(_SPECIALS) + 38  # the lower-case letters, space, newline and digits
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 128,
    padded_vocab_size: int | None = None,
    hidden: int = 64,
    intermediate: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context_length: int = 2048,
    entropy: float = 2.0,
    perturb: float = 0.0,
    perturb_seed: int = 0,
) -> Path:
    """Write a random-weight float32 Llama checkpoint into `folder` (made if missing) and return it.

    Args:
        seed: the weights follow from it and the sizes alone.
        vocab_size: tokens of the tokenizer, at least 41 and at most 935: three special ones, then characters,
            then all other bytes, then pairs of letters.
        padded_vocab_size: the model's vocabulary if it is to be larger than the tokenizer's; the padding's
            ids never come up in sampling, and the distribution over the others stays what it was.
        context_length: in tokens.
        entropy: nats of a next-token distribution, in the mean over contexts. At the default the most
            probable token has about 0.45.
        perturb: noise added to every matrix, relative to its standard deviation, so that a draft agrees
            with its target in part: with 128 tokens, sum(min(p, q)) is about 0.80 at 0.05, 0.63 at 0.1,
            0.40 at 0.2, 0.26 at 0.3 and 0.05 at 1.
        perturb_seed: chooses the noise.
    """
    model_vocab = padded_vocab_size if padded_vocab_size is not None else vocab_size
    assert model_vocab >= vocab_size, f"{padded_vocab_size=} is smaller than {vocab_size=}"
    shape = LlamaShape(
        vocab_size=model_vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        context_length=context_length,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = TextRules(tiny_tokenizer(vocab_size), "<s>", "</s>", "</s>", "<unk>", _CHAT_TEMPLATE)
    weights = _weights(shape, vocab_size, seed, entropy, perturb, perturb_seed)
    write_checkpoint(folder, shape, weights, text)
    return folder


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level tokenizer of exactly `vocab_size` tokens; a character without a token becomes `<unk>`."""
    alphabet = _byte_characters()
    letters = string.ascii_lowercase
    pairs = [(first, second) for first in letters for second in letters]
    limit = len(_SPECIALS) + len(alphabet) + len(pairs)
    assert _MIN_VOCAB <= vocab_size <= limit, f"{vocab_size=} is not between {_MIN_VOCAB} and {limit}"

    room = vocab_size - len(_SPECIALS)
    merges = pairs[: max(0, room - len(alphabet))]
    tokens = [*_SPECIALS, *alphabet[:room], *(first + second for first, second in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    return tokenizer


def _byte_characters() -> list[str]:
    # Byte-level BPE writes each byte as one visible character (space as "Ġ"); ours come first.
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(first, _)] = splitter.pre_tokenize_str(_CHARACTERS)
    return [*first, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(first))]


def _weights(
    shape: LlamaShape, vocab_size: int, seed: int, entropy: float, perturb: float, perturb_seed: int
) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for index, (name, size) in enumerate(shape.tensor_shapes().items()):
        if len(size) == 1:
            tensors[name] = np.ones(size, np.float32)
            continue
        # One stream per tensor, filled row by row: padding the vocabulary changes no other weight.
        matrix = np.random.default_rng([seed, index, 0]).standard_normal(size)
        noise = np.random.default_rng([seed, index, 1 + perturb_seed]).standard_normal(size)
        scale = _deviation(name, shape, vocab_size, entropy)
        tensors[name] = (scale * (matrix + perturb * noise)).astype(np.float32)

    # Channel 0 of the residual stream stays at 1, whatever the context; only padded rows of the output
    # look at it, and find a logit far below all others there.
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    for name, matrix in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            matrix[0, :] = 0.0
    tensors["lm_head.weight"][:, 0] = 0.0
    tensors["lm_head.weight"][vocab_size:, :] = 0.0
    tensors["lm_head.weight"][vocab_size:, 0] = -500.0
    return tensors


def _deviation(name: str, shape: LlamaShape, vocab_size: int, entropy: float) -> float:
    """The standard deviation of a matrix's entries, so that every activation has a spread of about 1."""
    match name.split(".")[-2]:
        case "embed_tokens":
            return 1.0
        case "lm_head":
            return _logit_spread(vocab_size, entropy) / math.sqrt(shape.hidden_size)
        case "q_proj" | "k_proj":
            # Attention scores then spread by 2.25: each head looks at a few positions, not at all alike.
            return 1.5 / math.sqrt(shape.hidden_size)
        case "o_proj":
            return 2.0 / math.sqrt(shape.hidden_size)
        case "down_proj":
            return 2.0 / math.sqrt(shape.intermediate_size)
        case _:
            return 1.0 / math.sqrt(shape.hidden_size)


def _logit_spread(vocab_size: int, entropy: float) -> float:
    """How far independent Gaussian logits must spread for this mean entropy (nats), by bisection."""
    flattest = math.log(vocab_size)
    assert 0.2 <= entropy <= flattest - 0.05, f"{entropy=} nats is not between 0.2 and ln V = {flattest:.2f}"
    logits = np.random.default_rng([vocab_size]).standard_normal((512, vocab_size))
    low, high = 0.0, 50.0
    for _ in range(40):
        middle = (low + high) / 2
        weights = np.exp(middle * (logits - logits.max(axis=1, keepdims=True)))
        probabilities = weights / weights.sum(axis=1, keepdims=True)
        measured = -(probabilities * np.log(probabilities + 1e-300)).sum(axis=1).mean()
        low, high = (middle, high) if measured > entropy else (low, middle)
    return low
