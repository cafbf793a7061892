"""SGLang's overlap scheduler, for real: each step is decided, scheduled and run before the outcome of the one before.

Two overlapping servers switch gamma at random between 0 and 5, against one that neither overlaps nor speculates:

    page1: the draft has the target's own weights, so every draft must be accepted; gamma changes at
           every step, and a drafted token makes a step 10 ms longer, so that its time tells its gamma
    page16-tp2: a draft that agrees in part, on two ranks

Their pools are small, so that slots are evicted and requests retracted. SGLang checks its slots after every step.
"""

import random
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import Server, serve, serve_all, tail
from tiny_model import make_tiny_model
from workload import (
    Request,
    assert_pool_empties,
    assert_same,
    hang_up,
    histogram,
    mixed_requests,
    nightjar,
    random_tokens,
    run_all,
)

from sglang_nightjar.observe.journal import read_journal

MOST = 5
PACE_S = 0.01
STEPS = 1000
POOL = 2560
ROOT = Path(__file__).resolve().parents[1]


class Servers(NamedTuple):
    plain: Server
    page1: Server
    page16: Server
    target: Path
    journals: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    models, journals = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("journals")
    target = make_tiny_model(models / "target", layers=4)
    other = make_tiny_model(models / "draft", layers=4, perturb=0.05)
    common: list[Any] = ["--model-path", target, "--chunked-prefill-size", 128]
    off = [*common, "--nightjar-policy", "off"]
    overlap = [*common, "--nightjar-overlap", "on", "--max-total-tokens", POOL, "--schedule-conservativeness", 0.1]

    def speculating(name: str, draft: Path, policy: str) -> list[Any]:
        words: list[Any] = ["--speculative-draft-model-path", draft, "--nightjar-policy", policy]
        return [*overlap, *words, "--nightjar-journal", journals / name]

    command_lines = [
        off,
        speculating("page1", target, "random:1"),
        [*speculating("page16", other, "random:3"), "--page-size", 16, "--tp", 2],
    ]
    environ = {
        "PACE_S": str(PACE_S),
        "PYTHONPATH": str(ROOT),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    }
    with serve_all(command_lines, module="paced_launch", environ=environ) as started:
        yield Servers(*started, target, journals)


@pytest.fixture(params=["page1", "page16"])
def server(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Server]:
    """An overlapping server with an empty cache, alive and without a lost slot after the test."""
    chosen: Server = getattr(servers, request.param)
    chosen.flush_cache()
    yield chosen
    assert_pool_empties(chosen)


@pytest.fixture
def accepts_all(servers: Servers) -> Iterator[None]:
    """Whatever the test does: the draft with the target's weights is never wrong."""
    before = nightjar(servers.page1)["rejected_drafts"]
    yield
    assert nightjar(servers.page1)["rejected_drafts"] == before


@pytest.mark.usefixtures("accepts_all")
def test_same_tokens_as_without_speculation(server: Server, servers: Servers) -> None:
    requests = mixed_requests(seed=3)
    cold, warm = run_all(servers.plain, requests), run_all(servers.plain, requests)
    for expected in (cold, warm):
        answers = run_all(server, requests)
        assert server.alive(), tail(server.log)
        assert_same(answers, expected)
    assert sum(histogram(answers, MOST)[1:]) > 0, "some drafts are accepted"
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 1000


def test_a_request_is_told_of_its_own_steps(servers: Servers) -> None:
    """Those in which it drafted, which here are those in which a draft was accepted, and none after its end."""
    told = [answer["meta_info"] for answer in run_all(servers.page1, mixed_requests(seed=6)[::2], at_once=4)]
    steps = [meta["nightjar"][0]["speculative_steps"] for meta in told]
    assert steps == [sum((meta.get("spec_correct_drafts_histogram") or [])[1:]) for meta in told]
    assert sum(steps) > 100


def test_without_a_draft_it_overlaps_too(servers: Servers) -> None:
    requests = mixed_requests(seed=4)[::3]
    with serve("--model-path", servers.target, "--nightjar-policy", "off", "--nightjar-overlap", "on") as server:
        assert_same(run_all(server, requests), run_all(servers.plain, requests))
        assert_pool_empties(server)


@pytest.mark.usefixtures("accepts_all")
def test_retracted_requests(server: Server, servers: Servers) -> None:
    rng = random.Random(7)
    shared = random_tokens(rng, 40)
    requests = [Request(shared + random_tokens(rng, rng.randrange(1, 40)), 200, stops=True) for _ in range(32)]
    answers = run_all(server, requests, at_once=32)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0, "the pool was not too small after all"
    assert_same(answers, run_all(servers.plain, requests))


@pytest.mark.usefixtures("accepts_all")
def test_aborts(server: Server, servers: Servers) -> None:
    rng = random.Random(8)
    shared = random_tokens(rng, 150)
    prompts = [shared[: rng.randrange(1, 150)] + random_tokens(rng, rng.randrange(1, 200)) for _ in range(60)]
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda item: hang_up(server, Request(item[1], 64), item[0] % 6), enumerate(prompts)))
    assert_pool_empties(server)
    requests = mixed_requests(seed=1)[::4]
    assert_same(run_all(server, requests), run_all(servers.plain, requests))


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 0.8, "presence_penalty": 0.3},
        {"repetition_penalty": 1.5, "min_new_tokens": 20},
        {"regex": "[a-z]{3,9}( [a-z]{3,9}){2,12}"},
        {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'},
        {"stop": ["a", "e"]},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_what_depends_on_the_output_so_far(sampling: dict[str, Any], server: Server, servers: Servers) -> None:
    """It is a step behind in the scheduler, and must not be in the step."""
    rng = random.Random(9)
    prompts = [random_tokens(rng, rng.randrange(1, 60)) for _ in range(12)]
    answers, expected = (
        each.generate_many(prompts, at_once=12, max_new_tokens=48, **sampling) for each in (server, servers.plain)
    )
    assert_same(answers, expected)


def test_logprobs(server: Server, servers: Servers) -> None:
    prompt = random_tokens(random.Random(10), 30)
    answers = [
        each.generate(prompt, ignore_eos=True, request={"return_logprob": True}) for each in (server, servers.plain)
    ]
    mine, other = (answer["meta_info"]["output_token_logprobs"] for answer in answers)
    assert [token for _, token, _ in mine] == [token for _, token, _ in other]
    assert [value for value, _, _ in mine] == pytest.approx([value for value, _, _ in other], abs=1e-4)


@pytest.fixture(scope="module")
def journal(servers: Servers) -> list[dict[str, Any]]:
    """Of the server whose drafts are all accepted: every directive, and at least `STEPS` decode steps without anything
    that would reject a draft, such as a grammar."""
    rng = random.Random(11)
    requests = [Request(random_tokens(rng, rng.randrange(1, 120)), 160) for _ in range(24)]
    expected = run_all(servers.plain, requests, at_once=4)
    assert_pool_empties(servers.page1)
    begun = len(read_journal(servers.journals / "page1"))
    for _ in range(20):
        assert_same(run_all(servers.page1, requests, at_once=4), expected)
        records = read_journal(servers.journals / "page1")
        records = [record for index, record in enumerate(records) if index >= begun or record["record"] == "directive"]
        if len(decode_steps(records)) >= STEPS:
            return records
    raise AssertionError(f"too few steps: {nightjar(servers.page1)}")


def decode_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["record"] == "step" and record["batch_size"] > 0]


def test_outcomes_arrive_a_step_late(journal: list[dict[str, Any]]) -> None:
    """So that the tests below mean something: by then, later directives are in force, most with another gamma."""
    gammas = [record["gamma"] for record in journal if record["record"] == "directive"]
    assert sum(a != b for a, b in pairwise(gammas)) > STEPS / 2 and set(gammas) == set(range(MOST + 1))
    in_force = late = other = 0
    for record in journal:
        if record["record"] == "directive":
            in_force, gamma = record["step"], record["gamma"]
        elif record["record"] == "step" and record["batch_size"] > 0:
            late += record["directive"] == in_force - 1
            other += record["gamma"] != gamma
    assert late > 0.9 * STEPS and other > STEPS / 2, (late, other)


def test_every_outcome_lands_on_the_gamma_that_earned_it(journal: list[dict[str, Any]]) -> None:
    """Its directive's gamma; and of that gamma, since each request that drafts is accepted in full."""
    gammas = {record["step"]: record["gamma"] for record in journal if record["record"] == "directive"}
    steps = decode_steps(journal)
    full = 0
    for step in steps:
        gamma = gammas[step["directive"]]
        assert step["gamma"] == gamma, step
        committed = {index + 1: count for index, count in enumerate(step["committed"]) if count}
        assert set(committed) <= {1, gamma + 1}, step
        if step["drafted"] == step["batch_size"] or gamma == 0:
            assert set(committed) <= {gamma + 1}, step
            full += gamma > 0 and step["cut"] == 0
    assert len(steps) >= STEPS and full > STEPS / 2, (len(steps), full)


def test_every_time_lands_on_the_gamma_that_earned_it(journal: list[dict[str, Any]]) -> None:
    """A drafted token takes 10 ms. A step takes that and its work; credited to its neighbour, it would be too short."""
    steps = decode_steps(journal)
    too_short = [step for step in steps if step["seconds"] < PACE_S * step["gamma"]]
    assert not too_short, too_short[:3]
    assert statistics.median(step["seconds"] for step in steps if step["gamma"] == 0) < PACE_S * MOST
    swapped = sum(after["seconds"] < PACE_S * before["gamma"] for before, after in pairwise(steps))
    assert swapped > STEPS / 20, "the check would notice"


def test_numbers_follow_each_other(journal: list[dict[str, Any]]) -> None:
    numbers = [record["number"] for record in journal if record["record"] == "step"]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "every launch had one outcome, in order"


def test_ranks_agree(servers: Servers) -> None:
    run_all(servers.page16, mixed_requests(seed=5)[::2])
    assert_pool_empties(servers.page16)
    of_rank = [
        [record for record in read_journal(servers.journals / name) if record["record"] == "directive"]
        for name in ("page16", "page16.rank1")
    ]
    assert of_rank[0] == of_rank[1] and len(of_rank[0]) > 100
    assert nightjar(servers.page16)["channel"]["disagreements"] == 0


def test_the_servers_did_everything(servers: Servers) -> None:
    for server in (servers.page1, servers.page16):
        counted = nightjar(server)
        assert min(counted["steps_by_gamma"]) > 20 and counted["switches"] > 20, counted
        assert counted["catchup_tokens"] > 100 and counted["memory"] is None, counted
