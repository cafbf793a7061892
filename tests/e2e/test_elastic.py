"""The draft leaves and returns under load, again and again, and no client notices.

The draft has the target's own weights, so one stale, lost or misplaced KV entry shows as a rejected
draft or as another token than a server without speculation gives. SGLang checks its slots after every
step. All of it step by step, and again with overlap scheduling, where a step is under way whenever a move is due.
`NIGHTJAR_TEST_CYCLES` sets how many times the draft leaves and returns (1,000 takes minutes).
"""

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from elastic import memory, settle
from serving import Server, serve_all, tail
from tiny_model import make_tiny_model
from workload import Request, assert_pool_empties, hang_up, nightjar, random_tokens, run_all

from sglang_nightjar.observe.journal import read_journal

POOL = 1024
CYCLES = int(os.environ.get("NIGHTJAR_TEST_CYCLES", "10"))
SETUPS = {"page1": (1, 1), "page16-tp2": (16, 2)}


class Servers(NamedTuple):
    plain: Server
    elastic: dict[str, Server]
    journals: Path
    overlapping: bool


@pytest.fixture(scope="module", params=["off", "on"], ids=["step-by-step", "overlapping"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    journals = tmp_path_factory.mktemp("journals")
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=4)
    command_lines: list[list[Any]] = [["--model-path", model, "--nightjar-policy", "off", "--max-total-tokens", 4096]]
    for name, (page_size, ranks) in SETUPS.items():
        words: list[Any] = ["--model-path", model, "--speculative-draft-model-path", model]
        words += ["--nightjar-policy", "random:3", "--nightjar-elastic", "on", "--nightjar-reload-chunk-mb", 1]
        words += ["--nightjar-catchup-budget-ms", 20, "--nightjar-cooldown-s", 3600]  # only the tests move the draft
        words += ["--page-size", page_size, "--tp", ranks, "--max-total-tokens", POOL, "--chunked-prefill-size", 128]
        words += ["--schedule-conservativeness", 0.1, "--nightjar-overlap", request.param]
        command_lines.append([*words, "--nightjar-journal", journals / name])
    environ = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
    with serve_all(command_lines, environ=environ) as (plain, *elastic):
        yield Servers(plain, dict(zip(SETUPS, elastic, strict=True)), journals, request.param == "on")


@pytest.fixture(params=list(SETUPS))
def server(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Server]:
    """A server whose draft is resident, before the test and after it, and which then holds no slot."""
    chosen = servers.elastic[request.param]
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


def test_the_pool_takes_all_the_draft_held(server: Server, request: pytest.FixtureRequest) -> None:
    """Weights and KV: as many slots as a server of the same budget without a draft, less a page per buffer."""
    page_size, ranks = SETUPS[request.node.callspec.params["server"]]
    before = memory(server)
    settle(server, "EVICTED")
    after = memory(server)
    held = before["device_bytes"]
    freed = held["draft_weights"] + held["draft_kv"]
    gained = after["device_bytes"]["target_kv"] - held["target_kv"]
    buffers, row_bytes, memory_page = 2 * 4, 2 // ranks * 16 * 4, 4096
    assert after["slots"] == after["slots_evicted"] > before["slots"] == POOL
    assert 0 <= freed - gained <= buffers * memory_page
    room = held["target_kv"] + freed
    without_draft = room // (buffers * row_bytes) // page_size * page_size - page_size  # one page is SGLang's dummy
    assert without_draft - memory_page // row_bytes <= after["slots"] <= without_draft
    room = held["target_kv"] + held["draft_weights"]
    weights_alone = room // (buffers * row_bytes) // page_size * page_size - page_size
    assert weights_alone - memory_page // row_bytes <= before["slots_weights_only"] <= weights_alone
    said = f"has {after['slots']} slots, with it {POOL}; its weights alone would make {before['slots_weights_only']}"
    assert server.log.read_text().count(said) == ranks
    assert after["device_bytes"]["draft_weights"] == after["device_bytes"]["draft_kv"] == 0
    info = server.get("/server_info")
    assert info["internal_states"][0]["memory_usage"]["token_capacity"] == after["slots"]


@pytest.mark.timeout(600 + 10 * CYCLES)
def test_cycles_under_load(server: Server, servers: Servers) -> None:
    work = requests(0, 160)
    expected = output(run_all(servers.plain, work))
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
            # Whether the tail was in use in those cycles is chance: now the draft stays away for long enough, in one
            # of a few attempts.
            for _ in range(10):
                if memory(server)["moved_slots"] > before["moved_slots"]:
                    break
                settle(server, "EVICTED")
                run_all(server, work[:32], at_once=4)
                settle(server, "RESIDENT")
        finally:
            stop.set()
        finished = list(itertools.chain.from_iterable(future.result() for future in running))
    wrong = [index for index, tokens in finished if tokens != expected[index]]
    assert not wrong and len(finished) >= CYCLES, f"{len(wrong)} of {len(finished)} answers differ: {wrong[:5]}"
    after = memory(server)
    assert after["evictions"] - before["evictions"] >= CYCLES and after["failures"] == 0, after
    assert after["device_bytes"] == before["device_bytes"], "the ledger returns to where it was"
    assert after["copied_bytes"] > before["copied_bytes"] and 0 < after["most_copied_bytes"] <= 1 << 20
    counted = nightjar(server)
    assert counted["rejected_drafts"] == 0 and counted["accept_length"] > 1.0, counted
    assert after["moved_slots"] > before["moved_slots"], "the tail was never in use when it had to go"


def test_a_prefix_cached_away_from_home(server: Server, servers: Servers) -> None:
    """Cached while the draft is away, relocated when it returns, and used again then."""
    rng = random.Random(5)
    shared = random_tokens(rng, 90)
    work = [Request(shared + random_tokens(rng, 90), 8) for _ in range(12)]
    expected = output(run_all(servers.plain, work))
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


@contextmanager
def moving(server: Server) -> Iterator[None]:
    """The draft leaves and returns for as long as the block runs."""
    over = threading.Event()

    def move() -> None:
        for residency in itertools.cycle(["EVICTED", "RESIDENT"]):
            if over.is_set():
                return
            settle(server, residency)

    with ThreadPoolExecutor(1) as pool:
        mover = pool.submit(move)
        try:
            yield
        finally:
            over.set()
        mover.result()


def test_requests_retracted_while_the_draft_moves(server: Server, servers: Servers) -> None:
    rng = random.Random(7)
    # Requests that may end early: SGLang admits more of those than there is room for.
    work = [Request(random_tokens(rng, rng.randrange(1, 40)), 240, stops=True) for _ in range(32)]
    expected = output(run_all(servers.plain, work))
    before = memory(server)["evictions"]
    retracted = 0
    for _ in range(5):  # how large the pool is when it fills is chance
        with moving(server):
            answers = run_all(server, work, at_once=32)
        assert output(answers) == expected
        retracted += sum(answer["meta_info"]["num_retractions"] for answer in answers)
        if retracted > 0 and memory(server)["evictions"] > before + 1:
            break
    assert retracted > 0, "the pool was large enough"
    assert memory(server)["evictions"] > before + 1
    assert nightjar(server)["rejected_drafts"] == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pauses_while_the_draft_moves(server: Server, servers: Servers, mode: str) -> None:
    """A pause meets outcomes that a move has had processed already, and those it has not."""
    work = requests(8, 32)
    expected = output(run_all(servers.plain, work))
    with ThreadPoolExecutor(1) as pool, moving(server):
        running = pool.submit(run_all, server, work)
        while not running.done():
            server.post("/pause_generation", {"mode": mode})
            server.post("/continue_generation", {})
            # What a pause has retracted is prefilled again: some must decode before the next one, or none ever ends.
            before = sum(nightjar(server)["steps_by_gamma"])
            while sum(nightjar(server)["steps_by_gamma"]) < before + 5 and not running.done():
                time.sleep(0.05)
        assert output(running.result()) == expected


def test_moves_are_made_with_no_step_under_way(server: Server, servers: Servers) -> None:
    """The step launched under an earlier directive lands before a turn is made; with overlap, after any other."""
    with moving(server):
        run_all(server, requests(9, 60))
    name = next(name for name, each in servers.elastic.items() if each is server)
    late: dict[bool, list[int]] = {True: [], False: []}  # steps that landed after directives with a turn, and others
    turn, in_force = False, 0
    for record in read_journal(servers.journals / name):
        if record["record"] == "directive":
            turn, in_force = record["turn"] != 0, record["step"]
        elif record["record"] == "step" and record["directive"] < in_force:
            late[turn].append(record["number"])
            turn = False
    assert not late[True], late[True]
    assert (len(late[False]) > 100) == servers.overlapping, len(late[False])
