"""Logprobs, stop conditions and grammars: what a server without speculation gives, on a real model.

The draft is the target's 4-bit twin, which agrees with it on about three tokens of four, so that
runs of every length are accepted and cut. Requests that differ in their parameters go out in one
batch: that is quicker, and none may disturb another.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from serving import Server, serve_all

TOLERANCE = 1e-4
PROMPTS = [
    "The capital of France is",
    "List five animals and the sounds they make:\n1.",
    "Once upon a time there was a",
    "def add(a, b):\n    ",
]
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = [CHAT.format(text) for text in ("What is the capital of Italy?", "Say hello.", "Name two colours.")]


KINDS = ("correct", "proposed")


class Pair(NamedTuple):
    plain: Server
    speculating: Server


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    compact = "--constrained-json-disable-any-whitespace"  # or a small model may write blanks for ever
    speculation = ["--nightjar-policy", "random:3", "--nightjar-draft-bits", 4]
    with serve_all([["--nightjar-policy", "off", compact], [*speculation, compact]]) as servers:
        yield Pair(*servers)


def ask(server: Server, prompts: Sequence[str], params: Sequence[dict[str, Any]], **request: Any) -> list[Any]:
    """Every prompt with every one of `params`, in one batch, greedy unless they say otherwise."""
    sampling = [{"temperature": 0.0, "max_new_tokens": 24, **each} for each in params for _ in prompts]
    body = {"text": [*prompts] * len(params), "sampling_params": sampling, **request}
    batch: list[Any] = server.post("/generate", body)
    return batch


def ask_both(
    pair: Pair, prompts: Sequence[str], params: Sequence[dict[str, Any]] = ({},), **request: Any
) -> list[tuple[Any, Any]]:
    """Pairs of answers, the speculating server's first; tokens, text and the end are the same."""
    expected, actual = (ask(server, prompts, params, **request) for server in pair)
    for index, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        which = f"{params[index // len(prompts)]}, {prompts[index % len(prompts)]!r}"
        assert mine["output_ids"] == other["output_ids"], which
        assert mine["text"] == other["text"], which
        for field in ("finish_reason", "completion_tokens"):
            assert mine["meta_info"][field] == other["meta_info"][field], which
    return list(zip(actual, expected, strict=True))


ENGLISH = [
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "List the first ten prime numbers:",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius. In Fahrenheit this is",
    "Translate to French: Good morning, how are you today?\nFrench:",
    "The three laws of thermodynamics, in order and in plain words, are as follows. First,",
    "Dear Sir or Madam,\n\nI am writing to complain about the noise that",
]


def test_plain_text(pair: Pair) -> None:
    """A real model and its twin as draft, cold and with a warm prefix cache."""
    for _ in range(2):
        both = ask_both(pair, ENGLISH, [{"max_new_tokens": 48}])
        assert_drafts_were_accepted_and_rejected([mine for mine, _ in both])
    accepted, proposed = (sum(mine["meta_info"][f"spec_num_{kind}_drafts"] for mine, _ in both) for kind in KINDS)
    # SGLang counts as proposed what the largest gamma would have; at 0.75 a token this is 0.27.
    assert accepted > 0.15 * proposed, f"the twin is to agree most of the time: {accepted} of {proposed}"


def assert_drafts_were_accepted_and_rejected(answers: Sequence[Any]) -> None:
    accepted, proposed = (
        sum(answer["meta_info"].get(f"spec_num_{kind}_drafts", 0) for answer in answers) for kind in KINDS
    )
    assert 0 < accepted < proposed, f"{accepted} of {proposed} drafts accepted"


# Logprobs


def assert_close(mine: Any, other: Any) -> None:
    """Nested lists and tuples of numbers, strings and None, of one shape; floats within `TOLERANCE`."""
    if isinstance(other, list | tuple):
        assert len(mine) == len(other)
        for left, right in zip(mine, other, strict=True):
            assert_close(left, right)
    elif isinstance(other, float):
        assert math.isfinite(other) and abs(mine - other) < TOLERANCE, (mine, other)
    else:
        assert mine == other


OUTPUT_LOGPROBS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
INPUT_LOGPROBS = tuple(name.replace("output", "input") for name in OUTPUT_LOGPROBS)


def test_logprobs(pair: Pair) -> None:
    starts = [0, 2, 4, -1]
    wanted = {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [[1, 260, 4000]] * len(starts)}
    both = ask_both(pair, PROMPTS, logprob_start_len=starts, **wanted)
    for mine, other in both:
        for name in OUTPUT_LOGPROBS + INPUT_LOGPROBS:
            assert_close(mine["meta_info"][name], other["meta_info"][name])
        for name in OUTPUT_LOGPROBS:
            assert len(mine["meta_info"][name]) == len(mine["output_ids"]) == 24
    for (mine, _), start in zip(both, starts, strict=True):
        scored = mine["meta_info"]["prompt_tokens"] - start if start >= 0 else 0
        assert all(len(mine["meta_info"][name] or []) == scored for name in INPUT_LOGPROBS)
    assert_drafts_were_accepted_and_rejected([mine for mine, _ in both])


def test_one_logprob_per_token(pair: Pair) -> None:
    """Also where the end of a request cuts an accepted run."""
    params = [{"max_new_tokens": count} for count in (1, 2, 3, 5)]
    params += [{"stop": [".", "\n"]}, {"stop_token_ids": [28, 30]}]
    for mine, other in ask_both(pair, PROMPTS, params, return_logprob=True, top_logprobs_num=2):
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert len(mine["meta_info"][name]) == len(mine["output_ids"])
            assert_close(mine["meta_info"][name], other["meta_info"][name])


def test_only_some_requests_of_a_batch_want_logprobs(pair: Pair) -> None:
    tops = [3, 0, 0, 0]
    both = ask_both(pair, PROMPTS, return_logprob=[True, False, True, False], top_logprobs_num=tops)
    for (mine, other), count in zip(both, tops, strict=True):
        for name in OUTPUT_LOGPROBS:
            assert_close(mine["meta_info"].get(name), other["meta_info"].get(name))
        assert not count or [len(row) for row in mine["meta_info"]["output_top_logprobs"]] == [count] * 24


def test_logprobs_of_adjusted_logits(pair: Pair) -> None:
    """Penalties, bias and a minimal length change the distribution that logprobs are taken from."""
    params = {"frequency_penalty": 0.8, "logit_bias": {"260": 4.0, "30": -3.0}, "min_new_tokens": 20}
    both = ask_both(pair, PROMPTS, [params], return_logprob=True, top_logprobs_num=5)
    for (mine, other), plain in zip(both, ask(pair.plain, PROMPTS, [{}]), strict=True):
        assert_close(mine["meta_info"]["output_top_logprobs"], other["meta_info"]["output_top_logprobs"])
        assert mine["output_ids"] != plain["output_ids"]


def test_logprobs_at_a_temperature(pair: Pair) -> None:
    """Log ratios at temperature T are the model's over T, which the other server tells for the same tokens."""
    temperature = 0.7
    answers = ask(pair.speculating, PROMPTS, [{"temperature": temperature}], return_logprob=True, top_logprobs_num=5)
    assert_drafts_were_accepted_and_rejected(answers)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        meta = answer["meta_info"]
        ids = pair.plain.post("/v1/tokenize", {"model": "default", "prompt": prompt})["tokens"]
        assert len(ids) == meta["prompt_tokens"]
        score = {"return_logprob": True, "logprob_start_len": len(ids) - 1, "top_logprobs_num": 20}
        scored = pair.plain.generate(ids + answer["output_ids"], max_new_tokens=0, request=score)
        of_model = [
            {token: logprob for logprob, token, _ in tops}
            for tops in scored["meta_info"]["input_top_logprobs"][1:]  # the first entry has no token before it
        ]
        assert len(of_model) == len(meta["output_top_logprobs"]) == len(answer["output_ids"])
        for drawn, tops, model in zip(
            meta["output_token_logprobs"], meta["output_top_logprobs"], of_model, strict=True
        ):
            best, best_token, _ = tops[0]
            for logprob, token, _ in tops[1:]:
                assert abs((logprob - best) * temperature - (model[token] - model[best_token])) < TOLERANCE
            assert drawn[0] <= best and sum(math.exp(logprob) for logprob, _, _ in tops) < 1 + 1e-5
            assert all(logprob == drawn[0] for logprob, token, _ in tops if token == drawn[1])


def test_openai_logprobs(pair: Pair) -> None:
    completion = {"model": "default", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12, "logprobs": 3}
    expected, actual = (server.post("/v1/completions", completion)["choices"][0]["logprobs"] for server in pair)
    assert actual["tokens"] == expected["tokens"] and len(actual["tokens"]) == 12
    assert_close(actual["token_logprobs"], expected["token_logprobs"])
    for mine, other in zip(actual["top_logprobs"], expected["top_logprobs"], strict=True):
        assert_close([*mine.items()], [*other.items()])

    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    expected, actual = (server.post("/v1/chat/completions", chat)["choices"][0]["logprobs"] for server in pair)
    for mine, other in zip(actual["content"], expected["content"], strict=True):
        for left, right in zip([mine, *mine["top_logprobs"]], [other, *other["top_logprobs"]], strict=True):
            assert left["token"] == right["token"]
            assert_close(left["logprob"], right["logprob"])


# Where an answer ends

ENDS: list[dict[str, Any]] = [
    *({"max_new_tokens": count} for count in (1, 2, 3, 4, 5, 7)),
    {"max_new_tokens": 2, "ignore_eos": True},
    {"max_new_tokens": 40},
    {"max_new_tokens": 40, "ignore_eos": True},
    {"max_new_tokens": 40, "min_new_tokens": 30},
    {"max_new_tokens": 40, "min_new_tokens": 12, "stop_token_ids": [30]},
    {"max_new_tokens": 40, "stop": "."},
    {"max_new_tokens": 40, "stop": ["\n", "user", "<|im_start|>"]},
    {"max_new_tokens": 40, "stop": ["\n"], "skip_special_tokens": False, "no_stop_trim": True},
    {"max_new_tokens": 40, "stop": ["e", "a", " the"]},
    {"max_new_tokens": 40, "stop_token_ids": [30, 28]},
    {"max_new_tokens": 40, "stop_regex": [r"[A-Z][a-z]+\."]},
]


def test_answers_end_where_they_would(pair: Pair) -> None:
    both = ask_both(pair, QUESTIONS + PROMPTS, ENDS)
    reasons = {str(other["meta_info"]["finish_reason"].get("matched", "length")) for _, other in both}
    assert {"length", ".", "\n", "e", "a"} < reasons and reasons & {"30", "28"}, reasons
    assert_drafts_were_accepted_and_rejected([mine for mine, _ in both])


def test_several_choices(pair: Pair) -> None:
    expected, actual = (ask(server, PROMPTS[:2], [{"n": 3}]) for server in pair)
    assert [answer["output_ids"] for answer in actual] == [answer["output_ids"] for answer in expected]
    assert len(actual) == 6
    choices = ask(pair.speculating, PROMPTS[:1], [{"n": 4, "temperature": 1.0}])
    assert len({tuple(answer["output_ids"]) for answer in choices}) > 1


# Grammars

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "milk"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
SUM = 'root ::= number " + " number (" + " number)? " = " number\nnumber ::= [0-9] [0-9]?'
GRAMMARS: list[dict[str, Any]] = [{"json_schema": json.dumps(PERSON)}, {"regex": DATE}, {"ebnf": SUM}]


def conforms(grammar: dict[str, Any], text: str) -> bool:
    if "json_schema" not in grammar:
        return re.fullmatch(DATE if "regex" in grammar else r"\d\d?( \+ \d\d?){1,2} = \d\d?", text) is not None
    person = json.loads(text)
    return person.keys() == {"name", "age", "likes"} and set(person["likes"]) <= {"tea", "coffee", "milk"}


def check_grammars(answers: Sequence[Any], prompts: int) -> None:
    """Every answer that came to its end conforms; most do come to it, under each grammar."""
    for index, grammar in enumerate(GRAMMARS):
        own = answers[index * prompts : (index + 1) * prompts]
        ended = [answer["text"] for answer in own if answer["meta_info"]["finish_reason"]["type"] == "stop"]
        assert all(conforms(grammar, text) for text in ended), (grammar, ended)
        assert len(ended) > prompts // 2, (grammar, [answer["text"] for answer in own])


def test_grammars(pair: Pair) -> None:
    prompts = QUESTIONS + PROMPTS[:2]
    both = ask_both(pair, prompts, [{"max_new_tokens": 64, **grammar} for grammar in GRAMMARS])
    check_grammars([mine for mine, _ in both], len(prompts))
    assert_drafts_were_accepted_and_rejected([mine for mine, _ in both])


def test_grammars_at_a_temperature(pair: Pair) -> None:
    params = [{"temperature": 1.0, "max_new_tokens": 80, **grammar} for grammar in GRAMMARS]
    answers = ask(pair.speculating, QUESTIONS * 2, params)
    check_grammars(answers, 2 * len(QUESTIONS))
    assert len({answer["text"] for answer in answers}) > len(answers) // 2


def test_grammars_and_free_requests_share_a_batch(pair: Pair) -> None:
    params = [{}, GRAMMARS[0], {"frequency_penalty": 1.0}, GRAMMARS[1], {"stop": "."}]
    for mine, other in ask_both(pair, PROMPTS[:2], params, return_logprob=True):
        assert_close(mine["meta_info"]["output_token_logprobs"], other["meta_info"]["output_token_logprobs"])


def test_openai_json_schema(pair: Pair) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Describe a person as JSON."}],
        "temperature": 0,
        "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    }
    choices = [server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"] for server in pair]
    assert choices[0] == choices[1] and conforms(GRAMMARS[0], choices[0])
