"""Greedy speculation gives, token for token, what the same server gives without speculation.

40 prompts from one token to the whole context, chunked prefill, a family of shared prefixes,
16 requests at a time, all of it twice so that the second pass meets a warm prefix cache.

One server without speculation per number of ranks is the reference for all page sizes; the
others switch gamma at random every few steps between 0 and 5, which meets all gammas and all
switches between them, and one keeps the largest:

    --tp 1: page size 1 random, page size 16 random, page size 1 always 5
    --tp 2: page size 1 random, page size 16 random

SGLang checks its KV accounting after every step of these servers, and ends one that leaks.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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


RANDOM = "random:3"  # holds each gamma for one to three steps
MOST = 5


class Layout(NamedTuple):
    page_size: int
    policy: str


class Group(NamedTuple):
    """The servers of one number of ranks: without speculation, and one per layout."""

    plain: Server
    speculating: dict[Layout, Server]


LAYOUTS = {
    1: (Layout(1, RANDOM), Layout(16, RANDOM), Layout(1, f"static:{MOST}")),
    2: (Layout(1, RANDOM), Layout(16, RANDOM)),
}


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda ranks: f"tp{ranks}")
def group(request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path) -> Iterator[Group]:
    common = ["--model-path", tiny_target, "--chunked-prefill-size", CHUNK, "--tp", request.param]
    layouts = LAYOUTS[request.param]
    command_lines = [[*common, "--nightjar-policy", "off"]]
    for layout in layouts:
        words = ["--speculative-draft-model-path", tiny_draft, "--nightjar-policy", layout.policy]
        command_lines.append([*common, *words, "--page-size", layout.page_size])
    with serve_all(command_lines, environ=CHECK_EVERY_STEP) as (plain, *others):
        yield Group(plain, dict(zip(layouts, others, strict=True)))


def test_same_tokens_as_without_speculation(group: Group) -> None:
    requests = mixed_requests(seed=1)
    cold, warm = run_all(group.plain, requests), run_all(group.plain, requests)
    assert_same(warm, cold)
    for layout, server in group.speculating.items():
        for expected in (cold, warm):
            answers = run_all(server, requests)
            assert server.alive(), tail(server.log)
            assert_same(answers, expected)
            accepted = histogram(answers, MOST)
            # The switching server seldom drafts its most while a request that would accept all of it runs.
            assert min(accepted[:4]) > 0, f"{layout}: the draft is to agree in part, not {accepted}"
        cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        assert cached > 8000, f"the second pass found {cached} tokens in the prefix cache"


def test_abort_storm_leaks_nothing(group: Group) -> None:
    """100 requests, half of them dropped by their clients mid-stream."""
    for layout, server in group.speculating.items():
        if layout.policy != RANDOM:
            continue
        rng = random.Random(MOST)
        shared = random_tokens(rng, 150)
        prompts = [shared[: rng.randrange(1, 150)] + random_tokens(rng, rng.randrange(1, 300)) for _ in range(100)]

        def send(index: int, server: Server = server, rng: random.Random = rng, prompts: Any = prompts) -> None:
            hang_up(server, Request(prompts[index], 64), after_events=rng.randrange(6) if index % 2 else 1000)

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(send, range(len(prompts))))
        assert_pool_empties(server)
        requests = mixed_requests(seed=1)[::4]
        assert_same(run_all(server, requests), run_all(group.plain, requests))
        counted = nightjar(server)
        assert min(counted["steps_by_gamma"]) > 0 and counted["switches"] > 10, counted
