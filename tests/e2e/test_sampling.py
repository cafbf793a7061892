"""Sampling at temperature > 0: the same distribution as without speculation, and with seeds the same tokens.

Distribution: 1,800 answers to one prompt from each server, their first three tokens compared by
chi-square tests. The first token comes from the prefill's ordinary sampler, the others from
verification. A batch of token ids reaches the scheduler as one message, so with fixed seeds
these figures do not change from run to run on one machine.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chi_square import p_value_of_two_samples
from serving import Server, serve_all
from tiny_model import make_tiny_model

PROMPT = [40, 7, 93, 11, 58, 24, 24, 70]
SAMPLES = 1800
MAX_AT_ONCE = 256
UNLIKELY, IMPOSSIBLE = 1e-3, 1e-6

# Six tokens share nearly all probability, so that they repeat within a few and penalties show.
FEW = {"logit_bias": {str(token): 13.0 for token in (10, 30, 50, 70, 90, 110)}}
# What is set, and the same without the part that these very tests must notice.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 0.7}, {}),
    "top-k": ({"top_k": 4}, {}),
    "top-p": ({"top_p": 0.6}, {}),
    "min-p": ({"min_p": 0.15}, {}),
    "logit bias": (FEW, {}),
    "frequency penalty": ({**FEW, "frequency_penalty": 1.5}, FEW),
    "presence penalty": ({**FEW, "presence_penalty": 1.5}, FEW),
    "repetition penalty": ({**FEW, "repetition_penalty": 0.25}, FEW),
    "all together": ({**FEW, "frequency_penalty": 1.5, "top_k": 5, "top_p": 0.97, "min_p": 0.02}, FEW),
}

Samples = list[tuple[int, ...]]


class Pair(NamedTuple):
    plain: Server
    speculating: Server


@pytest.fixture(scope="module")
def half_agreeing_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_target` with more noise: sum(min(p, q)) is about 0.63, so that runs of all lengths are accepted."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "draft", perturb=0.1)


def command_lines(target: Path, draft: Path, *words: str) -> list[list[Any]]:
    common = ["--model-path", target, "--max-running-requests", MAX_AT_ONCE, *words]
    speculation = ["--speculative-draft-model-path", draft, "--nightjar-policy", "random:3"]
    # Two seeds: with one, both servers would draw the same first tokens.
    return [[*common, "--random-seed", 1, "--nightjar-policy", "off"], [*common, "--random-seed", 2, *speculation]]


@pytest.fixture(scope="module")
def pair(tiny_target: Path, half_agreeing_draft: Path) -> Iterator[Pair]:
    with serve_all(command_lines(tiny_target, half_agreeing_draft)) as servers:
        yield Pair(*servers)


@pytest.fixture(scope="module")
def seeded_pair(tiny_target: Path, half_agreeing_draft: Path) -> Iterator[Pair]:
    with serve_all(command_lines(tiny_target, half_agreeing_draft, "--enable-deterministic-inference")) as servers:
        yield Pair(*servers)


def answers(server: Server, params: Sequence[dict[str, Any]]) -> list[Any]:
    """One answer to `PROMPT` per element of `params`, in one batch."""
    defaults = {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [PROMPT] * len(params), "sampling_params": [{**defaults, **each} for each in params]}
    batch: list[Any] = server.post("/generate", body)
    return batch


def tokens_of(batch: Sequence[Any]) -> Samples:
    return [tuple(answer["output_ids"]) for answer in batch]


def sample(server: Server, **params: Any) -> Samples:
    return tokens_of(answers(server, [params] * SAMPLES))


@pytest.fixture(scope="module")
def plain_samples(pair: Pair) -> Callable[..., Samples]:
    """What the server without speculation draws, kept by parameters."""
    kept: dict[str, Samples] = {}

    def draw(**params: Any) -> Samples:
        if str(params) not in kept:
            kept[str(params)] = sample(pair.plain, **params)
        return kept[str(params)]

    return draw


def p_values(first: Samples, second: Samples) -> dict[str, float]:
    """Of the first, second and third token, and of neighbours together, which show how one depends on the other."""
    views = {"1": slice(0, 1), "2": slice(1, 2), "3": slice(2, 3), "1 and 2": slice(0, 2), "2 and 3": slice(1, 3)}
    return {
        name: p_value_of_two_samples([tokens[view] for tokens in first], [tokens[view] for tokens in second])
        for name, view in views.items()
    }


def assert_same_distribution(draw: Callable[[], tuple[Samples, Samples]]) -> Samples:
    """Equal by every test; samples that look unlikely are drawn once more, since a real difference stays.

    Returns:
        The first of the two samples.
    """
    for _ in range(2):
        first, second = draw()
        measured = p_values(first, second)
        if min(measured.values()) > UNLIKELY:
            return first
    raise AssertionError(f"sampled from another distribution; p-values by position: {measured}")


def test_temperature_one(pair: Pair) -> None:
    drafts = [0, 0]

    def draw() -> tuple[Samples, Samples]:
        batch = answers(pair.speculating, [{}] * SAMPLES)
        for i, name in enumerate(("spec_num_correct_drafts", "spec_num_proposed_drafts")):
            drafts[i] += sum(answer["meta_info"][name] for answer in batch)
        return tokens_of(batch), sample(pair.plain)

    assert_same_distribution(draw)
    # SGLang counts as proposed what the largest gamma would have, and the answers end after three more tokens.
    assert 0.02 < drafts[0] / drafts[1] < 0.9, f"the draft is to agree in part: {drafts[0]} of {drafts[1]}"


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.25])
def test_another_temperature_is_noticed(temperature: float, pair: Pair, plain_samples: Callable[..., Samples]) -> None:
    measured = p_values(sample(pair.speculating, temperature=temperature), plain_samples())
    assert measured["2 and 3"] < IMPOSSIBLE, measured


@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name: str, pair: Pair, plain_samples: Callable[..., Samples]) -> None:
    params, without = SETTINGS[name]
    drawn = assert_same_distribution(lambda: (sample(pair.speculating, **params), sample(pair.plain, **params)))
    ignored = p_values(drawn, plain_samples(**without))
    assert ignored["2 and 3"] < IMPOSSIBLE, f"not to be told from {without}: {ignored}"


def test_greedy_and_random_requests_in_one_batch(pair: Pair) -> None:
    """Every other request of a batch is greedy; each kind keeps its own distribution."""
    [greedy] = tokens_of(answers(pair.plain, [{"temperature": 0.0}]))

    def draw() -> tuple[Samples, Samples]:
        mixed = tokens_of(answers(pair.speculating, [{"temperature": float(i % 2)} for i in range(2 * SAMPLES)]))
        assert set(mixed[::2]) == {greedy}
        return mixed[1::2], sample(pair.plain)

    assert_same_distribution(draw)


# SGLang has no seeded min-p: its sampler asserts that no request asks for it, so it is refused.
SEEDED_SETTINGS = {"temperature 1": {}} | {
    name: params for name, (params, _) in SETTINGS.items() if "min_p" not in params
}


@pytest.mark.parametrize("name", SEEDED_SETTINGS)
def test_seeds_give_the_same_tokens(name: str, seeded_pair: Pair) -> None:
    """Each answer depends on its seed and its context alone: not on speculation, nor on the other requests."""
    plain, speculating = seeded_pair
    params = [
        {**SEEDED_SETTINGS[name], "sampling_seed": 1000 + i, "max_new_tokens": 20 + i % 30, "ignore_eos": i % 2 == 0}
        for i in range(64)
    ]
    expected = tokens_of(answers(plain, params))
    assert tokens_of(answers(speculating, params)) == expected
    assert len(set(expected)) > 60, "each seed is to give its own tokens"
    assert tokens_of(answers(speculating, params[5:6])) == expected[5:6]
    assert tokens_of(answers(plain, params[40:44])) == expected[40:44]


def test_openai_seed(seeded_pair: Pair) -> None:
    body = {"model": "default", "prompt": "a seed is a promise", "temperature": 1.0, "max_tokens": 40}
    texts = [
        server.post("/v1/completions", {**body, "seed": seed})["choices"][0]["text"]
        for seed in (7, 8)
        for server in (*seeded_pair, seeded_pair.speculating)
    ]
    assert len(set(texts[:3])) == len(set(texts[3:])) == 1 and texts[0] != texts[3]


def test_seeded_min_p_is_refused(seeded_pair: Pair) -> None:
    for server in seeded_pair:
        assert server.status_of("/generate", {"input_ids": PROMPT, "sampling_params": {"min_p": 0.1}}) == 400
        assert len(server.generate(PROMPT, max_new_tokens=3)["output_ids"]) == 3
