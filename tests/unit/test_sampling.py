"""Verification draws, row by row, what SGLang's own sampler draws in a plain decode of that position."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import p_value_of_sample
from plain_sampling import VOCAB, make_request, plain_sample, plain_step, sampling_context, sampling_info
from sglang.srt.layers import sampler as upstream

from sglang_nightjar.kernels.seed_hash import seed_hash
from sglang_nightjar.speculation.penalties import asks_for_penalties
from sglang_nightjar.speculation.sampling import accepted_drafts, most_likely, sample_chain

WIDTH = 4
COMMITTED = 6  # output tokens of each request, the bonus token included

BATCHES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 3,
    "temperatures": [{"temperature": value} for value in (0.3, 1.0, 1.7)],
    "top-k": [{"top_k": 3}, {"top_k": 40, "temperature": 2.0}],
    "top-p": [{"top_p": 0.5}, {"top_p": 0.95, "temperature": 1.5}],
    "top-k and top-p": [{"top_k": 5, "top_p": 0.7, "temperature": 2.0}] * 2,
    "logit bias": [{"logit_bias": {"4": 5.0, "8": -3.0}}, {"temperature": 0.0, "logit_bias": {"9": 50.0}}],
    "penalties": [{"frequency_penalty": 0.9, "presence_penalty": 0.4}, {"repetition_penalty": 1.5}],
    "greedy and random": [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"top_k": 4, "frequency_penalty": 0.5},
        {"top_p": 0.6, "logit_bias": {"12": 2.0}},
    ],
}


class Mask:
    """A grammar's mask over logit rows."""

    def __init__(self, allowed: torch.Tensor) -> None:
        self.allowed = allowed

    def apply(self, logits: torch.Tensor) -> None:
        logits.masked_fill_(~self.allowed, float("-inf"))


class Chains:
    """Random chains of one batch, sampled by us and by SGLang. `seed` draws logits, tokens and masks."""

    def __init__(self, params: list[dict[str, Any]], seed: int, *, masked: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = len(params)
        self.params = [{"temperature": 1.0, "sampling_seed": seed + i, **p} for i, p in enumerate(params)]
        self.logits = torch.randn(size * WIDTH, VOCAB, generator=generator) * 2
        tokens = torch.randint(3, 20, (size, COMMITTED + WIDTH - 1), generator=generator)
        self.outputs = tokens[:, :COMMITTED].tolist()
        self.candidates = tokens[:, COMMITTED - 1 :]
        self.seq_lens = torch.randint(COMMITTED, 2000, (size,), generator=generator)
        allowed = torch.rand(size * WIDTH, VOCAB, generator=generator) < 0.3
        self.allowed = allowed if masked else None

    def ours(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, WIDTH], and the adjusted logits."""
        requests = [make_request(out, **params) for out, params in zip(self.outputs, self.params, strict=True)]
        info, _batch = sampling_info(requests)
        logits = self.logits.clone()
        tokens = sample_chain(
            sampler=upstream.Sampler(),
            logits=logits,
            candidates=self.candidates,
            seq_lens=self.seq_lens,
            reqs=requests,
            sampling_info=info.copy_for_forward(),
            grammar_mask=None if self.allowed is None else Mask(self.allowed),
            penalized=any(asks_for_penalties(req) for req in requests),
            keep_logits=True,
        )
        return tokens, logits

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from a plain decode of each position in turn."""
        tokens, adjusted = [], torch.empty_like(self.logits)
        for j in range(WIDTH):
            seen = [out + chain[1 : j + 1].tolist() for out, chain in zip(self.outputs, self.candidates, strict=True)]
            requests = [make_request(out, **params) for out, params in zip(seen, self.params, strict=True)]
            mask = None if self.allowed is None else Mask(self.allowed[j::WIDTH])
            logits, info = plain_step(self.logits[j::WIDTH].clone(), requests, seen, mask)
            adjusted[j::WIDTH] = logits
            tokens.append(plain_sample(logits, info, self.seq_lens + j))
        return torch.stack(tokens, 1).long(), adjusted


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sampling depends on the request's seed and the position alone, so that draws can be compared."""
    monkeypatch.setattr(upstream, "murmur_hash32", seed_hash)
    with sampling_context(seeded=True):
        yield


@pytest.mark.parametrize("masked", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize("name", BATCHES)
def test_same_draws_as_a_plain_decode(name: str, masked: bool, seeded: None) -> None:
    drawn, most_likely = [], []
    for seed in range(10):
        chains = Chains(BATCHES[name], 100 * seed, masked=masked)
        tokens, adjusted = chains.ours()
        expected, plain_logits = chains.plain()
        assert torch.equal(tokens, expected), f"seed {seed}"
        torch.testing.assert_close(adjusted, plain_logits, rtol=1e-5, atol=1e-5)
        drawn.append(tokens)
        most_likely += [adjusted.argmax(-1).view_as(tokens)]
    for i, params in enumerate(BATCHES[name]):
        surprises = (torch.stack(drawn)[:, i] != torch.stack(most_likely)[:, i]).sum()
        assert (surprises == 0) == (params.get("temperature") == 0.0), f"request {i}: {surprises} of {10 * WIDTH}"


@pytest.mark.parametrize(
    "params",
    [
        [{"min_p": 0.3}, {"min_p": 0.05, "temperature": 1.5}],
        [{"min_p": 0.2, "top_k": 6, "top_p": 0.9}, {"temperature": 0.0}, {"min_p": 0.1, "presence_penalty": 0.8}],
    ],
    ids=["alone", "mixed"],
)
def test_min_p_draws_from_the_same_weights(params: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has no seeded min-p: compare the weights it would draw from."""
    drawn_from: list[torch.Tensor] = []

    def first_of_the_heaviest(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        drawn_from.append(weights.clone())
        return weights.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", first_of_the_heaviest)
    with sampling_context(seeded=False):
        chains = Chains(params, seed=5)
        tokens, _ = chains.ours()
        expected, _ = chains.plain()
    assert torch.equal(tokens, expected)
    ours, *plain = drawn_from
    torch.testing.assert_close(ours, torch.stack(plain, 1).view_as(ours))
    assert len(plain) == WIDTH and 0 < (ours == 0).float().mean() < 1


def test_unseeded_draws_follow_the_target() -> None:
    size = 20_000
    torch.manual_seed(1)
    with sampling_context(seeded=False):
        chains = Chains([{"temperature": 0.8}] * size, seed=3)
        chains.logits = chains.logits[:WIDTH].repeat(size, 1)
        tokens, logits = chains.ours()
    for j in range(WIDTH):
        counts = torch.bincount(tokens[:, j], minlength=VOCAB).numpy()
        assert p_value_of_sample(counts, torch.softmax(logits[j].double() / 0.8, -1).numpy()) > 1e-3
        assert p_value_of_sample(counts, torch.softmax(logits[j].double() / 0.85, -1).numpy()) < 1e-6


def test_logits_stay_for_logprobs(seeded: None) -> None:
    """Sampling works in place; what the caller keeps must be the adjusted logits, not probabilities."""
    chains = Chains([{"temperature": 0.5}, {"top_p": 0.5}], seed=1)
    _, logits = chains.ours()
    assert torch.equal(logits, chains.logits)


@pytest.mark.parametrize(
    ("draws", "drafts", "accepted"),
    [
        ([1, 2, 3, 4], [1, 2, 3], 3),
        ([1, 2, 9, 4], [1, 2, 3], 2),
        ([9, 2, 3, 4], [1, 2, 3], 0),
        ([1, 9, 3, 4], [1, 2, 3], 1),
    ],
)
def test_accepted_drafts(draws: list[int], drafts: list[int], accepted: int) -> None:
    assert accepted_drafts(torch.tensor([draws]), torch.tensor([[0, *drafts]])).tolist() == [accepted]


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86 32-bit of whole words, seed 0, in plain Python from its specification."""
    h, low = 0, 0xFFFFFFFF
    for word in np.frombuffer(data, "<u4").tolist():
        k = word * 0xCC9E2D51 & low
        k = (k << 15 | k >> 17) & low
        h ^= k * 0x1B873593 & low
        h = (h << 13 | h >> 19) & low
        h = (h * 5 + 0xE6546B64) & low
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & low
    return h ^ h >> 16


def test_seed_hash() -> None:
    assert murmur3(b"test") == 0xBA6BD213 and murmur3(bytes(4)) == 0x2362F9DE  # published values
    seeds, positions, tokens = [0, 1, 42, 2**63 - 1, 2**64 - 3], [0, 1, 7, 2047, 2**31 + 5], [0, 1, 127, 49151]
    hashed = seed_hash(torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(tokens))
    for row, seed, position in zip(hashed.tolist(), seeds, positions, strict=True):
        expected = [murmur3(np.array([seed & 0xFFFFFFFF, seed >> 32, position, t], "<u4").tobytes()) for t in tokens]
        assert row == expected


def test_most_likely_takes_prefixes_by_cumulative_probability() -> None:
    probabilities = torch.tensor([[0.9, 0.9, 0.9], [0.5, 1.0, 1.0], [0.99, 0.1, 1.0]])
    # Cumulative: .9 .81 .729 | .5 .5 .5 | .99 .099 .099
    assert most_likely(probabilities, 1).tolist() == [0, 0, 1]
    assert most_likely(probabilities, 4).tolist() == [3, 0, 1]
    assert most_likely(probabilities, 6).tolist() == [3, 2, 1]
    assert most_likely(probabilities, 100).tolist() == [3, 3, 3]
    assert most_likely(probabilities, 0).tolist() == [0, 0, 0]
