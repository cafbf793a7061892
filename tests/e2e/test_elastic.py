"""The draft leaves and returns under load, again and again, and no client notices.

The draft has the target's own weights, so one stale, lost or misplaced KV entry shows as a rejected
draft or as another token than a server without speculation gives. SGLang checks its slots after every
step. `NIGHTJAR_TEST_CYCLES` sets how many times the draft leaves and returns (1,000 takes minutes).
"""

import itertools
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from elastic import memory, settle
from serving import Server, serve_all, tail
from tiny_model import make_tiny_model
from workload import Request, assert_pool_empties, hang_up, nightjar, random_tokens, run_all

POOL = 1024
CYCLES = int(os.environ.get("NIGHTJAR_TEST_CYCLES", "40"))
SETUPS = {"page1": (1, 1), "page16-tp2": (16, 2)}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=4)
    command_lines: list[list[Any]] = [["--model-path", model, "--nightjar-policy", "off", "--max-total-tokens", 4096]]
    for page_size, ranks in SETUPS.values():
        words: list[Any] = ["--model-path", model, "--speculative-draft-model-path", model]
        words += ["--nightjar-policy", "random:3", "--nightjar-elastic", "on", "--nightjar-reload-chunk-mb", 1]
        words += ["--nightjar-catchup-budget-ms", 20, "--nightjar-cooldown-s", 3600]  # only the tests move the draft
        words += ["--page-size", page_size, "--tp", ranks, "--max-total-tokens", POOL, "--chunked-prefill-size", 128]
        words += ["--nightjar-journal", tmp_path_factory.mktemp("journals") / "journal"]
        command_lines.append(words)
    with serve_all(command_lines, environ={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}) as started:
        yield dict(zip(("plain", *SETUPS), started, strict=True))


@pytest.fixture(params=list(SETUPS))
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Iterator[Server]:
    """A server whose draft is resident, before the test and after it, and which then holds no slot."""
    chosen = servers[request.param]
    settle(chosen, "RESIDENT")
    yield chosen
    settle(chosen, "RESIDENT")
    assert_pool_empties(chosen)


def requests(seed: int, count: int) -> list[Request]:
    """Prompts of 1 to 200 tokens, half of them with a shared prefix, some of several chunks, and 2 to 60 tokens to
    generate."""
    rng = random.Random(seed)
    shared = random_tokens(rng, 150)
    prompts = [
        (shared[: rng.randrange(150)] if index % 2 else []) + random_tokens(rng, rng.randrange(1, 60))
        for index in range(count)
    ]
    for index in range(0, count, 16):
        prompts[index] = random_tokens(rng, rng.randrange(300, 500))
    return [Request(prompt, rng.randrange(2, 60)) for prompt in prompts]


def output(answers: list[Any]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_the_pool_takes_all_the_draft_held(server: Server) -> None:
    """Weights and KV: as many slots as a server of the same budget without a draft, less a page per buffer."""
    before = memory(server)
    settle(server, "EVICTED")
    after = memory(server)
    held = before["device_bytes"]
    freed = held["draft_weights"] + held["draft_kv"]
    gained = after["device_bytes"]["target_kv"] - held["target_kv"]
    buffers = 2 * 4
    assert after["slots"] == after["slots_evicted"] > before["slots"] == POOL
    assert 0 <= freed - gained <= buffers * 4096
    assert after["device_bytes"]["draft_weights"] == after["device_bytes"]["draft_kv"] == 0
    info = server.get("/server_info")
    assert info["internal_states"][0]["memory_usage"]["token_capacity"] == after["slots"]


def test_cycles_under_load(server: Server, servers: dict[str, Server]) -> None:
    work = requests(0, 160)
    expected = output(run_all(servers["plain"], work))
    before = memory(server)
    stop = threading.Event()

    def load() -> list[tuple[int, list[int]]]:
        rng = random.Random(threading.get_ident())
        done = []
        while not stop.is_set():
            index = rng.randrange(len(work))
            done.append((index, output(run_all(server, [work[index]]))[0]))
        return done

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(load) for _ in range(8)]
        try:
            for _ in range(CYCLES):
                settle(server, "EVICTED")
                settle(server, "RESIDENT")
        finally:
            stop.set()
        finished = list(itertools.chain.from_iterable(future.result() for future in running))
    wrong = [index for index, tokens in finished if tokens != expected[index]]
    assert not wrong and len(finished) >= CYCLES, f"{len(wrong)} of {len(finished)} answers differ: {wrong[:5]}"
    after = memory(server)
    assert after["evictions"] - before["evictions"] >= CYCLES and after["failures"] == 0, after
    assert after["device_bytes"] == before["device_bytes"], "the ledger returns to where it was"
    counted = nightjar(server)
    assert counted["rejected_drafts"] == 0 and counted["accept_length"] > 1.0, counted
    assert after["moved_slots"] > before["moved_slots"], "the tail was never in use when it had to go"


def test_a_prefix_cached_away_from_home(server: Server, servers: dict[str, Server]) -> None:
    """Cached while the draft is away, relocated when it returns, and used again then."""
    rng = random.Random(5)
    shared = random_tokens(rng, 90)
    work = [Request(shared + random_tokens(rng, 90), 8) for _ in range(12)]
    expected = output(run_all(servers["plain"], work))
    server.flush_cache()
    settle(server, "EVICTED")
    assert output(run_all(server, work, at_once=2)) == expected  # the later ones find what the first have cached
    before = memory(server)["moved_slots"]
    settle(server, "RESIDENT")
    assert memory(server)["moved_slots"] > before, "prefixes that were just used again are worth moving"
    again = run_all(server, work)
    assert output(again) == expected and min(answer["meta_info"]["cached_tokens"] for answer in again) >= 80
    assert nightjar(server)["rejected_drafts"] == 0


def test_aborts_while_the_draft_moves(server: Server) -> None:
    rng = random.Random(6)
    work = [Request(random_tokens(rng, rng.randrange(1, 150)), 300) for _ in range(30)]
    with ThreadPoolExecutor(13) as pool:
        storms = [pool.submit(hang_up, server, request, index % 4) for index, request in enumerate(work)]
        for _ in range(4):
            settle(server, "EVICTED")
            settle(server, "RESIDENT")
        for storm in storms:
            storm.result()
    assert server.alive(), tail(server.log)
