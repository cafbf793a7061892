"""Greedy speculation gives, token for token, what the same server gives without speculation.

40 prompts from one token to the whole context, chunked prefill, a family of shared prefixes,
16 requests at a time, all of it twice so that the second pass meets a warm prefix cache.

Every layout (page size 1, 16 x --tp 1, 2) has a server whose gamma switches at random every few
steps between 0 and 5, which meets all gammas and all switches between them; two have one whose
gamma is fixed as well:

    page size 1,  tp 1: random, always 5        page size 16, tp 1: random
    page size 16, tp 2: random, always 1        page size 1,  tp 2: random

SGLang checks its KV accounting after every step of these servers, and ends one that leaks.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from serving import Server, serve_all, tail
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

CHUNK = 256  # tokens of one prefill step, so that the long prompts take several
CHECK_EVERY_STEP = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}


class Layout(NamedTuple):
    page_size: int
    ranks: int
    policies: tuple[str, ...]


class Group(NamedTuple):
    """The servers of one layout: without speculation, and one per policy."""

    plain: Server
    speculating: dict[str, Server]


RANDOM = "random:3"  # holds each gamma for one to three steps
MOST = 5


@pytest.fixture(
    scope="module",
    params=[
        Layout(1, 1, (RANDOM, "static:5")),
        Layout(16, 1, (RANDOM,)),
        Layout(1, 2, (RANDOM,)),
        Layout(16, 2, (RANDOM, "static:1")),
    ],
    ids=lambda layout: f"page{layout.page_size}-tp{layout.ranks}",
)
def group(request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path) -> Iterator[Group]:
    layout: Layout = request.param
    common = ["--model-path", tiny_target, "--chunked-prefill-size", CHUNK]
    common += ["--page-size", layout.page_size, "--tp", layout.ranks]
    speculation = ["--speculative-draft-model-path", tiny_draft, "--nightjar-policy"]
    command_lines = [[*common, "--nightjar-policy", "off"]]
    command_lines += [[*common, *speculation, policy] for policy in layout.policies]
    with serve_all(command_lines, environ=CHECK_EVERY_STEP) as (plain, *others):
        yield Group(plain, dict(zip(layout.policies, others, strict=True)))


def test_same_tokens_as_without_speculation(group: Group) -> None:
    requests = mixed_requests(seed=1)
    cold, warm = run_all(group.plain, requests), run_all(group.plain, requests)
    assert_same(warm, cold)
    for policy, server in group.speculating.items():
        for expected in (cold, warm):
            answers = run_all(server, requests)
            assert server.alive(), tail(server.log)
            assert_same(answers, expected)
            most = MOST if policy == RANDOM else int(policy.removeprefix("static:"))
            accepted = histogram(answers, most)
            # The switching server seldom drafts its most while a request that would accept all of it runs.
            assert min(accepted[:4]) > 0, f"{policy}: the draft is to agree in part, not {accepted}"
        cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        assert cached > 8000, f"the second pass found {cached} tokens in the prefix cache"


def test_abort_storm_leaks_nothing(group: Group) -> None:
    """100 requests, half of them dropped by their clients mid-stream."""
    server = group.speculating[RANDOM]
    rng = random.Random(MOST)
    shared = random_tokens(rng, 150)
    prompts = [shared[: rng.randrange(1, 150)] + random_tokens(rng, rng.randrange(1, 300)) for _ in range(100)]

    def send(index: int) -> None:
        hang_up(server, Request(prompts[index], 64), after_events=rng.randrange(6) if index % 2 else 1000)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(send, range(len(prompts))))
    assert_pool_empties(server)
    requests = mixed_requests(seed=1)[::4]
    assert_same(run_all(server, requests), run_all(group.plain, requests))
    counted = nightjar(server)
    assert min(counted["steps_by_gamma"]) > 0 and counted["switches"] > 10, counted


ENGLISH = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "List the first ten prime numbers:",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius. In Fahrenheit this is",
    "Translate to French: Good morning, how are you today?\nFrench:",
    "The three laws of thermodynamics, in order and in plain words, are as follows. First,",
    "Dear Sir or Madam,\n\nI am writing to complain about the noise that",
]


def test_demo_pair() -> None:
    """A real model and its 8-bit twin as draft, as served when no model is named."""
    gamma = 3
    command_lines = [["--nightjar-policy", policy] for policy in ("off", f"static:{gamma}")]
    with serve_all(command_lines, environ=CHECK_EVERY_STEP) as (plain, speculating):
        for _ in range(2):
            expected, answers = (
                server.generate_many(ENGLISH, at_once=8, max_new_tokens=48) for server in (plain, speculating)
            )
            assert_same(answers, expected)
        accepted = histogram(answers, gamma)
        assert accepted[gamma] > 0.7 * sum(accepted), f"drafts accepted per verification: {accepted}"
        assert_pool_empties(speculating)
