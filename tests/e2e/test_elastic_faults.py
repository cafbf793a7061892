"""Faults while the draft moves, on two ranks: every request is answered, nothing is lost, nothing stays stuck.

What fails is switched on and off by a file (`faulty_launch.py` lists the faults). DRAINING is RELOADING before the
pool has been contracted.
"""

import os
import random
import signal
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from elastic import ask, memory, settle
from serving import Server, serve_all, tail, wait_for
from tiny_model import make_tiny_model
from workload import Request, assert_pool_empties, hang_up, nightjar, random_tokens, run_all

ROOT = Path(__file__).resolve().parents[1]
# The states in which a fault finds a server: the move that leads there, and what keeps it there.
HELD = {"EVICTING": ("evict", "hold:evict"), "DRAINING": ("reload", "full"), "RELOADING": ("reload", "hold:reload")}
KILLED_IN = ("RESIDENT", "EVICTED", *HELD)


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "fault"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=4)


@contextmanager
def faulty(model: Path, fault: Path, *others: list[Any]) -> Iterator[list[Server]]:
    """A server of two ranks that has an elastic draft, and others with the given words."""
    words: list[Any] = ["--model-path", model, "--speculative-draft-model-path", model]
    words += ["--nightjar-policy", "random:3", "--nightjar-elastic", "on", "--nightjar-cooldown-s", 3600]
    words += ["--tp", 2, "--max-total-tokens", 1024]
    environ = {
        "FAULT_FILE": str(fault),
        "PYTHONPATH": str(ROOT),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    with serve_all([words, *others], module="faulty_launch", environ=environ) as started:
        yield started


@pytest.fixture(scope="module")
def servers(model: Path, fault: Path) -> Iterator[list[Server]]:
    """With a draft, and without."""
    plain = ["--model-path", model, "--nightjar-policy", "off", "--max-total-tokens", 1024]
    with faulty(model, fault, plain) as started:
        yield started


@pytest.fixture
def server(servers: list[Server], fault: Path) -> Iterator[Server]:
    """Two ranks, resident and without faults before and after the test, and no slot lost."""
    settle(servers[0], "RESIDENT")
    yield servers[0]
    arm(fault, "")
    settle(servers[0], "RESIDENT")
    assert_pool_empties(servers[0])


def work(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [Request(random_tokens(rng, rng.randrange(1, 120)), 50) for _ in range(16)]


def tokens(server: Server, seed: int) -> list[list[int]]:
    return [answer["output_ids"] for answer in run_all(server, work(seed), at_once=8)]


@contextmanager
def answered(servers: list[Server], seed: int) -> Iterator[None]:
    """Requests run meanwhile, and get the tokens that a server without speculation gives."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(tokens, servers[0], seed)
        yield
        assert answers.result() == tokens(servers[1], seed)


def arm(fault: Path, name: str) -> None:
    """The fault that servers find from now on, in one go: without any in between, what is held would go on."""
    new = fault.with_suffix(".new")
    new.write_text(name)
    new.replace(fault)


def ends_at(server: Server, residency: str, **more: Any) -> dict[str, Any]:
    """Waits until the draft is at `residency` and the counters have grown as `more` says; the memory's report."""

    def there() -> bool:
        found = {**memory(server), **nightjar(server)["channel"]}
        return found["residency"] == residency and all(found[name] >= value for name, value in more.items())

    wait_for(
        there,
        deadline=time.monotonic() + 60,
        give_up=lambda: not server.alive(),
        failure=lambda: f"{nightjar(server)}\n{tail(server.log)}",
    )
    return memory(server)


def hold_in(server: Server, state: str, fault: Path) -> None:
    """Brings a server's draft to `state`, and keeps it there while the fault is armed."""
    move, name = HELD[state]
    settle(server, "EVICTED" if move == "reload" else "RESIDENT")
    arm(fault, name)
    assert ask(server, move)
    found = ends_at(server, "EVICTING" if move == "evict" else "RELOADING")
    if state != "DRAINING":  # what is alive must fit before the pool is contracted
        slots = found["slots_resident"]
        wait_for(lambda: memory(server)["slots"] == slots, deadline=time.monotonic() + 60)


@pytest.mark.parametrize("name", ["commit:evict", "commit:evict@1", "decommit:evict", "decommit:evict@1"])
def test_eviction_fails(server: Server, servers: list[Server], fault: Path, name: str) -> None:
    before = memory(server)
    arm(fault, name)
    with answered(servers, 1):
        assert ask(server, "evict")
        after = ends_at(server, "RESIDENT", undone=before["undone"] + 1)
    assert after["slots"] == before["slots"] and after["device_bytes"] == before["device_bytes"]


@pytest.mark.parametrize(
    "name", ["commit:reload", "commit:reload@1", "decommit:reload", "thread", "thread@1", "mirror"]
)
def test_reload_fails(server: Server, servers: list[Server], fault: Path, name: str) -> None:
    settle(server, "EVICTED")
    before = memory(server)
    arm(fault, name)
    with answered(servers, 2):
        assert ask(server, "reload")
        after = ends_at(server, "EVICTED", undone=before["undone"] + 1)
    assert after["slots"] == before["slots"] and after["device_bytes"] == before["device_bytes"]


@pytest.mark.parametrize("move", ["evict", "reload"])
def test_undoing_fails_too(server: Server, servers: list[Server], fault: Path, move: str) -> None:
    """The draft stays away, the pool small; and it comes back once there is memory again."""
    if move == "reload":
        settle(server, "EVICTED")
    before = memory(server)
    arm(fault, "commit:evict,commit:reload")
    with answered(servers, 3):
        assert ask(server, move)
        after = ends_at(server, "EVICTED", undone=before["undone"] + 1)
        assert after["slots"] == after["slots_resident"]
        arm(fault, "")
        settle(server, "RESIDENT")


@pytest.mark.parametrize("move", ["evict", "reload"])
@pytest.mark.parametrize(("name", "counter"), [("refuse@1", "refused"), ("silent@1", "timed_out")])
def test_a_rank_that_will_not(
    server: Server, servers: list[Server], fault: Path, name: str, counter: str, move: str
) -> None:
    if move == "reload":
        settle(server, "EVICTED")
    before, state = nightjar(server)["channel"], memory(server)["residency"]
    arm(fault, name)
    with answered(servers, 4):
        assert ask(server, move)
        ends_at(server, state, aborted=before["aborted"] + 1, **{counter: before[counter] + 1})


def test_what_is_alive_never_fits(server: Server, servers: list[Server], fault: Path) -> None:
    settle(server, "EVICTED")
    before = nightjar(server)
    arm(fault, "full,impatient")
    with answered(servers, 5):
        assert ask(server, "reload")
        after = ends_at(server, "EVICTED", undone=before["memory"]["undone"] + 1)
    assert after["slots"] == before["memory"]["slots"] and after["device_bytes"] == before["memory"]["device_bytes"]
    assert after["postponed"] > before["memory"]["postponed"]


@pytest.mark.parametrize("name", ["mute@1", "hold:reload@1"])
def test_a_rank_that_is_never_done(server: Server, servers: list[Server], fault: Path, name: str) -> None:
    """The pool has been contracted, and then one rank falls silent or its thread hangs: undone once that is over."""
    settle(server, "EVICTED")
    before = nightjar(server)
    with answered(servers, 6):
        hold_in(server, "RELOADING", fault)
        arm(fault, f"{name},impatient")
        ends_at(server, "EVICTING", timed_out=before["channel"]["timed_out"] + 1)
        arm(fault, "")
        after = ends_at(server, "EVICTED", undone=before["memory"]["undone"] + 1)
    assert after["slots"] == before["memory"]["slots"] and after["device_bytes"] == before["memory"]["device_bytes"]


@pytest.mark.parametrize("state", HELD)
def test_aborts_meanwhile(server: Server, servers: list[Server], fault: Path, state: str) -> None:
    """Clients hang up, and requests are aborted by name, while the draft is between two places all the time; decoding
    goes on, and what is not aborted is answered."""
    rng = random.Random(7)
    storm = [Request(random_tokens(rng, rng.randrange(1, 150)), 300) for _ in range(24)]

    def abort(index: int) -> None:
        if index % 2:
            hang_up(server, storm[index], index % 6)
            return
        with ThreadPoolExecutor(1) as pool:
            name = f"{state}-{index}"
            answer = pool.submit(
                server.generate, storm[index].prompt, max_new_tokens=300, ignore_eos=True, request={"rid": name}
            )
            while not answer.done():
                server.post("/abort_request", {"rid": name})
                time.sleep(0.1)
            reasons.append(answer.result()["meta_info"]["finish_reason"]["type"])

    reasons: list[str] = []
    with answered(servers, 8):
        hold_in(server, state, fault)
        before = nightjar(server)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(abort, range(len(storm))))
        after = nightjar(server)
        assert after["memory"]["residency"] == before["memory"]["residency"], "it was not there all the time"
        assert after["memory"]["slots"] == before["memory"]["slots"] and reasons.count("abort") > len(reasons) // 2
        assert after["steps_by_gamma"][0] > before["steps_by_gamma"][0]
        assert after["steps_by_gamma"][1:] == before["steps_by_gamma"][1:]
        if state == "DRAINING":
            arm(fault, "full,impatient")  # it may not be taken back before the reload has been undone
        else:
            arm(fault, "")
        ends_at(server, "RESIDENT" if state == "RELOADING" else "EVICTED")


@pytest.fixture
def victim(model: Path, fault: Path) -> Iterator[Server]:
    """A server of the test's own; all at once would take too much memory."""
    with faulty(model, fault) as started:
        yield started[0]


@pytest.mark.parametrize("state", KILLED_IN)
def test_a_killed_rank_ends_its_server_and_no_other(
    servers: list[Server], victim: Server, fault: Path, state: str
) -> None:
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(victim.process.pid)], capture_output=True, text=True, check=True
    )
    ranks = [int(line.split()[0]) for line in listed.stdout.splitlines() if "scheduler" in line]
    assert len(ranks) == 2, listed.stdout
    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(run_all, victim, [request]) for request in work(5)]
        if state in HELD:
            hold_in(victim, state, fault)
        else:
            settle(victim, state)
        os.kill(ranks[1], signal.SIGKILL)
        for future in running:
            error = future.exception(timeout=120)
            assert error is None or isinstance(error, OSError | urllib.error.URLError), error
    wait_for(lambda: not victim.alive(), deadline=time.monotonic() + 60, failure=lambda: tail(victim.log))
    arm(fault, "")
    assert tokens(servers[0], 6) == tokens(servers[1], 6)
