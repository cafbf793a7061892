"""Penalties along a chain are those SGLang's own penalizers give when fed one token at a time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain_sampling import CONFIGURED_STOP, END_OF_TURN, EOS, VOCAB, make_request, plain_step, sampling_context

from sglang_nightjar.speculation.penalties import apply_penalties

GAMMA = 3
PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency": {"frequency_penalty": 0.7},
    "negative frequency": {"frequency_penalty": -1.3},
    "presence": {"presence_penalty": 1.1},
    "repetition": {"repetition_penalty": 1.4},
    "repetition below one": {"repetition_penalty": 0.6},
    "min_new_tokens": {"min_new_tokens": 8, "stop_token_ids": [13, 17]},
    "additive": {"frequency_penalty": 0.4, "presence_penalty": -0.9},
    "all": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.9,
        "repetition_penalty": 1.4,
        "min_new_tokens": 8,
        "stop_token_ids": [13],
    },
}


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    with sampling_context(seeded=False):
        yield


def random_chain(seed: int, committed: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Output so far, candidates (its last token, then drafts) and logits; few distinct tokens, so that they repeat."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(9, 15, (committed + GAMMA,), generator=generator)
    logits = torch.randn(GAMMA + 1, VOCAB, generator=generator) * 3
    return tokens[:committed].tolist(), tokens[committed - 1 :], logits


def expected_rows(output: list[int], chain: torch.Tensor, logits: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
    rows = []
    for j, row in enumerate(logits):
        seen = [*output, *chain[1 : j + 1].tolist()]
        plain, _ = plain_step(row.clone().unsqueeze(0), [make_request(seen, **params)], [seen])
        rows.append(plain)
    return torch.cat(rows)


@pytest.mark.parametrize("committed", [1, 4, 5, 8, 60])
@pytest.mark.parametrize("name", PENALTIES)
def test_each_row_is_what_a_plain_decode_sees(name: str, committed: int) -> None:
    output, chain, logits = random_chain(committed, committed)
    expected = expected_rows(output, chain, logits, PENALTIES[name])
    actual = logits.clone()
    apply_penalties(actual.unsqueeze(0), [make_request(output, **PENALTIES[name])], chain.unsqueeze(0))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual, logits) == (name == "none" or (name == "min_new_tokens" and committed >= 8))


@pytest.mark.parametrize("late", [1, 3])
@pytest.mark.parametrize("name", PENALTIES)
def test_tokens_not_appended_yet_count(name: str, late: int) -> None:
    output, chain, logits = random_chain(7, committed=7)
    expected, actual = logits.clone(), logits.clone()
    apply_penalties(expected.unsqueeze(0), [make_request(output, **PENALTIES[name])], chain.unsqueeze(0))
    behind = make_request(output[:-late], **PENALTIES[name])
    apply_penalties(actual.unsqueeze(0), [behind], chain.unsqueeze(0), {behind.rid: output[-late:]})
    assert torch.equal(actual, expected)


def test_each_request_of_a_batch_has_its_own() -> None:
    chains = [random_chain(seed, committed=2 + seed) for seed in range(len(PENALTIES))]
    actual = torch.stack([logits for _, _, logits in chains])
    requests = [
        make_request(output, **params) for (output, _, _), params in zip(chains, PENALTIES.values(), strict=True)
    ]
    apply_penalties(actual, requests, torch.stack([chain for _, chain, _ in chains]))
    for rows, (output, chain, logits), params in zip(actual, chains, PENALTIES.values(), strict=True):
        torch.testing.assert_close(rows, expected_rows(output, chain, logits, params), rtol=1e-5, atol=1e-5)


def test_the_drafts_of_the_chain_count() -> None:
    """Row j of a chain that repeats one token is lowered j more times than row 0."""
    chain = torch.tensor([[20, 21, 21, 21]])
    logits = torch.zeros(1, GAMMA + 1, VOCAB)
    apply_penalties(logits, [make_request([20], frequency_penalty=0.5)], chain)
    assert logits[0, :, 21].tolist() == [0.0, -0.5, -1.0, -1.5]
    assert logits[0, :, 20].tolist() == [-0.5] * 4


def test_every_stop_token_waits_for_min_new_tokens() -> None:
    """After 2 tokens of at least 4, the next two positions forbid every stop, the others none."""
    logits = torch.zeros(1, GAMMA + 1, VOCAB)
    request = make_request([30, 31], min_new_tokens=4, stop_token_ids=[13])
    apply_penalties(logits, [request], torch.tensor([[31, 32, 33, 34]]))
    forbidden = [row.isneginf().nonzero().flatten().tolist() for row in logits[0]]
    stops = sorted([EOS, END_OF_TURN, CONFIGURED_STOP, 13])
    assert forbidden == [stops, stops, [], []]


def test_a_request_without_tokenizer() -> None:
    logits = torch.zeros(1, 1, VOCAB)
    request = make_request([30], min_new_tokens=4)
    request.tokenizer = None
    apply_penalties(logits, [request], torch.tensor([[30]]))
    assert logits[0, 0].isneginf().nonzero().flatten().tolist() == [CONFIGURED_STOP]
