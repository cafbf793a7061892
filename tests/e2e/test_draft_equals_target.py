"""A draft with the target's own weights: every verification must accept every draft.

One that does not has met draft KV that is stale, missing or of another token, whatever
brought it there: cached prefixes, chunked prefill, aborts, later turns, retraction. The
pool is small on purpose, so that slots are evicted and used again all the time.

The last verification of a request may draft beyond its end; those drafts count here too,
since the models agree on them just as well. One of the servers switches gamma at random every
few steps, between 0 (no draft forward at all) and 5, with a small budget for catching up.
"""

import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from serving import Server, serve_all, tail
from tiny_model import make_tiny_model
from workload import Request, assert_pool_empties, hang_up, nightjar, random_tokens, run_all

POOL = 2560
CHUNK = 128


class Setup(NamedTuple):
    """One server and what it was started with. `switching`: gamma is at most the `gamma` given, and changes."""

    server: Server
    gamma: int
    page_size: int
    switching: bool


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Setup]]:
    # Every layer carries a wrong entry on to more of the later ones.
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=4)
    chosen = {"page1-tp2-switching": (5, 1, 2, "random:3"), "page16-tp1": (4, 16, 1, "static:4")}
    command_lines: list[list[Any]] = []
    for _, page_size, ranks, policy in chosen.values():
        words: list[Any] = ["--model-path", model, "--speculative-draft-model-path", model]
        words += ["--nightjar-policy", policy, "--page-size", page_size, "--tp", ranks]
        words += ["--max-total-tokens", POOL, "--chunked-prefill-size", CHUNK, "--schedule-conservativeness", 0.1]
        words += ["--nightjar-catchup-budget-ms", 20]
        command_lines.append(words)
    with serve_all(command_lines, environ={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}) as servers:
        yield {
            name: Setup(server, gamma, page_size, policy.startswith("random"))
            for server, (name, (gamma, page_size, _, policy)) in zip(servers, chosen.items(), strict=True)
        }


@pytest.fixture(params=["page1-tp2-switching", "page16-tp1"])
def setup(request: pytest.FixtureRequest, setups: dict[str, Setup]) -> Iterator[Setup]:
    """A server with an empty cache, which must be alive and leak-free after the test."""
    chosen = setups[request.param]
    chosen.server.flush_cache()
    yield chosen
    assert_pool_empties(chosen.server)


def assert_all_accepted(answers: Sequence[Any], setup: Setup) -> None:
    if setup.switching:
        counted = nightjar(setup.server)
        assert counted["rejected_drafts"] == 0 and counted["steps_by_gamma"][0] > 0, counted
        return
    gamma = setup.gamma
    for index, answer in enumerate(answers):
        meta = answer["meta_info"]
        verifications, histogram = meta["spec_verify_ct"], meta["spec_correct_drafts_histogram"]
        assert histogram == [0] * gamma + [verifications], f"request {index}: {histogram} of {verifications}"
        assert meta["spec_num_correct_drafts"] == gamma * verifications
        if meta["num_retractions"] == 0:  # a retracted request gets one more token from its new prefill
            assert verifications == math.ceil((meta["completion_tokens"] - 1) / (gamma + 1))


def generate(setup: Setup, prompt: list[int], count: int) -> Any:
    return run_all(setup.server, [Request(prompt, count)])[0]


def test_prompts_of_all_lengths_at_once(setup: Setup) -> None:
    rng = random.Random(0)
    lengths = (1, 2, 3, 15, 16, 17, 33, 64, 100, 127, 128, 129, 255, 256, 257, 300, 500, 900, 1500)
    requests = [Request(random_tokens(rng, length), rng.randrange(2, 50), length % 2 == 0) for length in lengths]
    assert_all_accepted(run_all(setup.server, requests), setup)


def test_requests_that_continue_and_diverge_from_a_cached_prefix(setup: Setup) -> None:
    rng = random.Random(1)
    shared = random_tokens(rng, 330)
    answer = generate(setup, shared, 30)
    branches = [shared, shared[:200], shared + answer["output_ids"]]
    branches += [shared[:keep] + random_tokens(rng, 40) for keep in (17, 100, 160, 161, 329)]
    branches += [shared + answer["output_ids"][:keep] + random_tokens(rng, 9) for keep in (1, 2, 3, 4, 16, 28, 29)]
    answers = run_all(setup.server, [Request(branch, 24) for branch in branches])
    assert_all_accepted([answer, *answers], setup)
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert min(cached) >= 16 and max(cached) > 330, cached


def test_slot_that_only_the_target_has_seen(setup: Setup) -> None:
    """A chain's last draft, when accepted, gets target KV only, and may enter the cache like that."""
    if setup.switching:
        pytest.skip("needs chains of a known length")

    def build_on_such_a_slot(seed: int) -> list[Any]:
        rng = random.Random(seed)
        prompt = random_tokens(rng, 15 - setup.gamma)
        first = generate(setup, prompt, setup.gamma + 2)  # one token of the prefill, then exactly one chain
        prefix = prompt + first["output_ids"][:-1]  # one page, and its last slot is such a one
        longer = prefix + random_tokens(rng, 16)
        only_prefill = generate(setup, longer, 1)  # ends before it drafts
        catches_up = generate(setup, prefix + random_tokens(rng, 4), 8)  # gives the slot its draft KV
        later = generate(setup, longer + random_tokens(rng, 2), 32)  # uses what was prefilled before that
        cached = [answer["meta_info"]["cached_tokens"] for answer in (only_prefill, catches_up, later)]
        assert cached == [16, 16, 32]
        return [first, catches_up, later]

    with ThreadPoolExecutor(8) as pool:
        for answers in pool.map(build_on_such_a_slot, range(16)):
            assert_all_accepted(answers, setup)


def test_conversations_over_several_turns(setup: Setup) -> None:
    def converse(seed: int) -> list[Any]:
        rng = random.Random(seed)
        text, answers = random_tokens(rng, rng.randrange(1, 60)), []
        for _ in range(5):
            answers.append(generate(setup, text, rng.randrange(2, 40)))
            text = text + answers[-1]["output_ids"] + random_tokens(rng, rng.randrange(1, 30))
        return answers

    with ThreadPoolExecutor(6) as pool:
        for answers in pool.map(converse, range(6)):
            assert_all_accepted(answers, setup)
            assert answers[-1]["meta_info"]["cached_tokens"] > 0


def test_requests_beside_and_after_aborted_ones(setup: Setup) -> None:
    rng = random.Random(3)
    shared = random_tokens(rng, 90)
    prompts = [shared[: rng.randrange(1, 90)] + random_tokens(rng, rng.randrange(1, 200)) for _ in range(40)]
    with ThreadPoolExecutor(12) as pool:
        hung_up = [pool.submit(hang_up, setup.server, Request(p, 400), i % 5) for i, p in enumerate(prompts[::2])]
        beside = run_all(setup.server, [Request(prompt, 30) for prompt in prompts[1::2]], at_once=8)
        for future in hung_up:
            future.result()
    after = run_all(setup.server, [Request(prompt + random_tokens(rng, 3), 20) for prompt in prompts])
    assert_all_accepted([*beside, *after], setup)


def test_retracted_requests(setup: Setup) -> None:
    """More than fits: SGLang takes KV away from running requests and prefills them again later."""
    rng = random.Random(4)
    shared = random_tokens(rng, 40)
    # Requests that may end early: SGLang admits more of those than there is room for.
    requests = [Request(shared + random_tokens(rng, rng.randrange(1, 40)), 240, stops=True) for _ in range(32)]
    answers = run_all(setup.server, requests, at_once=32)
    assert setup.server.alive(), tail(setup.server.log)
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert retractions > 0, "the pool was not too small after all"
    assert_all_accepted(answers, setup)


def test_switching_server_did_everything(setups: dict[str, Setup]) -> None:
    """The tests above met every gamma, both ways of switching, and catch-up in pieces."""
    counted = nightjar(setups["page1-tp2-switching"].server)
    assert min(counted["steps_by_gamma"]) > 20, counted
    assert counted["switches"] > 50 and counted["catchup_tokens"] > 1000, counted
    assert counted["accept_length"] > 2.5, counted
