"""Faults while the draft moves, on two ranks: every request is answered, nothing is lost, nothing stays stuck."""

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
from workload import Request, assert_pool_empties, nightjar, random_tokens, run_all

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "fault"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, fault: Path) -> Iterator[list[Server]]:
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "deep", layers=4)
    words: list[Any] = ["--model-path", model, "--speculative-draft-model-path", model]
    words += ["--nightjar-policy", "random:3", "--nightjar-elastic", "on", "--nightjar-cooldown-s", 3600]
    words += ["--tp", 2, "--max-total-tokens", 1024]
    environ = {
        "FAULT_FILE": str(fault),
        "PYTHONPATH": str(ROOT),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    plain = ["--model-path", model, "--nightjar-policy", "off", "--max-total-tokens", 1024]
    with serve_all([words, words, plain], module="faulty_launch", environ=environ) as started:
        yield started


@pytest.fixture
def server(servers: list[Server], fault: Path) -> Iterator[Server]:
    """Two ranks, resident and without faults before and after the test, and no slot lost."""
    settle(servers[0], "RESIDENT")
    yield servers[0]
    fault.write_text("")
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
        assert answers.result() == tokens(servers[2], seed)


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


def test_no_memory_while_evicting(server: Server, servers: list[Server], fault: Path) -> None:
    before = memory(server)
    fault.write_text("commit:evict")
    with answered(servers, 1):
        assert ask(server, "evict")
        after = ends_at(server, "RESIDENT", undone=before["undone"] + 1)
    assert after["slots"] == before["slots"] and after["device_bytes"] == before["device_bytes"]


@pytest.mark.parametrize("name", ["commit:reload", "thread", "mirror"])
def test_reload_fails(server: Server, servers: list[Server], fault: Path, name: str) -> None:
    settle(server, "EVICTED")
    before = memory(server)
    fault.write_text(name)
    with answered(servers, 2):
        assert ask(server, "reload")
        after = ends_at(server, "EVICTED", undone=before["undone"] + 1)
    assert after["slots"] == before["slots"] and after["device_bytes"] == before["device_bytes"]


@pytest.mark.parametrize(("name", "counter"), [("refuse", "refused"), ("silent", "timed_out")])
def test_a_rank_that_will_not(server: Server, servers: list[Server], fault: Path, name: str, counter: str) -> None:
    before = nightjar(server)["channel"]
    fault.write_text(name)
    with answered(servers, 4):
        assert ask(server, "evict")
        ends_at(server, "RESIDENT", aborted=before["aborted"] + 1, **{counter: before[counter] + 1})


def test_a_killed_rank_ends_its_server_and_no_other(servers: list[Server]) -> None:
    """The last test: it ends the second server."""
    victim = servers[1]
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(victim.process.pid)], capture_output=True, text=True, check=True
    )
    ranks = [int(line.split()[0]) for line in listed.stdout.splitlines() if "scheduler" in line]
    assert len(ranks) == 2, listed.stdout
    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(run_all, victim, [request]) for request in work(5)]
        assert ask(victim, "evict")
        os.kill(ranks[1], signal.SIGKILL)
        for future in running:
            error = future.exception(timeout=120)
            assert error is None or isinstance(error, OSError | urllib.error.URLError), error
    wait_for(lambda: not victim.alive(), deadline=time.monotonic() + 60, failure=lambda: tail(victim.log))
    assert tokens(servers[0], 6) == tokens(servers[2], 6)
