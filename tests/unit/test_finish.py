"""A request that gets several tokens at once ends where it would have ended token by token."""

import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_nightjar.patches.finish import finish_token_by_token

EOS = 0
LETTERS = " abc."


class Tokenizer:
    """One token, one character."""

    eos_token_id = EOS
    additional_stop_token_ids: set[int] = set()

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(LETTERS[token] for token in tokens)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [LETTERS.index(character) for character in text]


def make_request(grammar: Any = None, **params: Any) -> Req:
    tokenizer = Tokenizer()
    sampling = SamplingParams(**params)
    sampling.normalize(tokenizer)
    request = Req("test", "", array("q", [1]), sampling, vocab_size=len(LETTERS))
    request.tokenizer = tokenizer
    request.grammar = grammar
    return request


def one_by_one(tokens: Sequence[int], **params: Any) -> Req:
    request = make_request(**params)
    for token in tokens:
        request.output_ids.append(token)
        request.update_finish_state()
        if request.finished():
            break
    return request


def in_runs(tokens: Sequence[int], run: int, update: Any, **params: Any) -> Req:
    request = make_request(**params)
    for start in range(0, len(tokens), run):
        accepted = tokens[start : start + run]
        request.output_ids.extend(accepted)
        update(request, len(accepted))
        if request.finished():
            break
    return request


def ending(request: Req) -> Any:
    reason = None if request.finished_reason is None else request.finished_reason.to_json()
    return reason, list(request.output_ids_through_stop)


def ours(request: Req, count: int) -> None:
    finish_token_by_token(Req.update_finish_state, request, count)


PARAMS: list[dict[str, Any]] = [
    {"max_new_tokens": 9},
    {"max_new_tokens": 9, "ignore_eos": True},
    {"max_new_tokens": 40, "stop_token_ids": [3]},
    {"max_new_tokens": 12, "stop": ["ab", "c"]},
    {"max_new_tokens": 40, "stop": ["cc", "b."]},
    {"max_new_tokens": 11, "stop": ["abc"], "stop_token_ids": [4]},
    {"max_new_tokens": 40, "stop_regex": ["a+b", "c$"]},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("run", [2, 4])
def test_same_end_as_one_token_at_a_time(params: dict[str, Any], run: int) -> None:
    rng = random.Random(run)
    ends = set()
    for _ in range(200):
        tokens = [rng.choices(range(len(LETTERS)), weights=(1, 4, 4, 4, 4))[0] for _ in range(40)]
        expected = one_by_one(tokens, **params)
        actual = in_runs(tokens, run, ours, **params)
        assert ending(actual) == ending(expected), Tokenizer().decode(tokens)
        assert len(actual.output_ids) % run == 0 or len(actual.output_ids) == 40, "accepted tokens were lost"
        ends.add((type(actual.finished_reason), actual.finished_len))
    assert (len(ends) == 1) == ("ignore_eos" in params), ends


def test_upstream_lets_a_later_stop_win() -> None:
    """What the hook is for; once upstream finds the first stop itself, the hook can go."""
    tokens = [1, EOS, 3, 4]
    params = {"max_new_tokens": 40, "stop": ["c."]}
    assert ending(one_by_one(tokens, **params))[1] == ending(in_runs(tokens, 4, ours, **params))[1] == [1, EOS]
    assert ending(in_runs(tokens, 4, Req.update_finish_state, **params))[1] == tokens


def test_a_grammar_ends_with_the_last_token_of_its_run() -> None:
    """SGLang advances the grammar over the run first, and cuts the run where the grammar ends."""
    grammar = SimpleNamespace(is_terminated=lambda: True)
    request = make_request(grammar, max_new_tokens=40)
    request.output_ids.extend([1, 2, 3])
    ours(request, 3)
    assert ending(request) == ({"type": "stop", "matched": 3}, [1, 2, 3])
    assert request.grammar is grammar


def test_an_abort_keeps_what_came() -> None:
    request = make_request(max_new_tokens=40)
    request.to_finish = SimpleNamespace(to_json=lambda: "aborted")
    request.output_ids.extend([1, 2, 3])
    ours(request, 3)
    assert ending(request) == ("aborted", [1, 2, 3])
