"""Test support: real servers, started once per module and always ended, and a small HTTP client."""

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

BOOT_LIMIT_S = 300.0
FIRST_PORT, PORTS_OF_A_WORKER, PORTS_OF_A_SERVER = 10_000, 10_800, 1_200

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job: servers would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)

_turns = itertools.count(random.randrange(PORTS_OF_A_WORKER // PORTS_OF_A_SERVER))


class Server:
    """A running server. `generate` and `get` raise on any HTTP status but 200."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.log = log

    def generate(self, prompt: str | list[int] | list[str], **sampling: Any) -> Any:
        """One `/generate` call, greedy unless `sampling` says otherwise. Keywords of the request itself
        (such as `return_logprob`) go into `request={...}`."""
        request = sampling.pop("request", {})
        key = "input_ids" if isinstance(prompt, list) and isinstance(prompt[0], int) else "text"
        body = {key: prompt, "sampling_params": {"temperature": 0.0, "max_new_tokens": 32, **sampling}, **request}
        return self.post("/generate", body)

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.loads(response.read() or "null")

    def status_of(self, path: str, body: Any) -> int:
        """HTTP status of a POST, also when it is an error."""
        try:
            self.post(path, body)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def flush_cache(self) -> None:
        """Empties the radix cache."""
        self.post("/flush_cache", {})

    def generate_many(self, prompts: Sequence[Any], *, at_once: int, **sampling: Any) -> list[Any]:
        """All `prompts`, `at_once` in flight, answers in order."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **sampling), prompts))

    def alive(self) -> bool:
        return self.process.poll() is None


@contextmanager
def serve(
    *words: str | Path | int,
    module: str = "sglang_nightjar.launch_server",
    environ: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Starts one server on a free port and ends it, and only it, on the way out."""
    with serve_all([words], module=module, environ=environ) as servers:
        yield servers[0]


@contextmanager
def serve_all(
    command_lines: Sequence[Sequence[str | Path | int]],
    *,
    module: str = "sglang_nightjar.launch_server",
    environ: dict[str, str] | None = None,
) -> Iterator[list[Server]]:
    """Starts several servers together; booting waits on disk and on single threads, so they overlap well."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-test-")))
        servers: list[Server] = []
        stack.callback(_stop, servers)
        for index, words in enumerate(command_lines):
            log = folder / f"server-{index}.log"
            servers.append(_start(words, log, module, environ))
        deadline = time.monotonic() + BOOT_LIMIT_S
        for server in servers:
            _wait_until_ready(server, deadline)
        yield servers


def _start(words: Sequence[Any], log: Path, module: str, environ: dict[str, str] | None) -> Server:
    port = free_port()
    command = [sys.executable, "-m", module, "--port", str(port), *map(str, words)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**_own_environment(), **(environ or {})},
            start_new_session=True,
        )
    return Server(port, process, log)


def _own_environment() -> dict[str, str]:
    """This process's environment without its thread counts (a server sets those itself, by its ranks) and
    what is meant for the tests (a server refuses options it does not know)."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.endswith("_NUM_THREADS") and not name.startswith("NIGHTJAR_TEST_")
    }


def free_port() -> int:
    """A port for a server to bind half a minute from now.

    Below the kernel's ephemeral range, out of which any connection may take a port meanwhile. Test processes that
    run side by side draw from different thousands, and two servers of one process are far enough apart for the
    ports that SGLang picks by itself (100 to 1000 above the server's)."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + worker % 2 * PORTS_OF_A_WORKER
    for _ in range(100):
        port = first + next(_turns) * PORTS_OF_A_SERVER % PORTS_OF_A_WORKER + random.randrange(100)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"found no free port between {first} and {first + PORTS_OF_A_WORKER}")


def _wait_until_ready(server: Server, deadline: float) -> None:
    wait_for(
        lambda: b"ready to roll" in server.log.read_bytes(),
        deadline=deadline,
        give_up=lambda: not server.alive(),
        failure=lambda: f"server did not come up; its log ends with\n{tail(server.log)}",
    )


def wait_for(
    condition: Callable[[], bool],
    *,
    deadline: float,
    give_up: Callable[[], bool] = lambda: False,
    failure: Callable[[], str] = lambda: "gave up waiting",
) -> None:
    """Polls `condition` until it holds; AssertionError at the `deadline` (monotonic seconds) or on `give_up`."""
    while not condition():
        assert time.monotonic() < deadline and not give_up(), failure()
        time.sleep(0.2)


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _stop(servers: Sequence[Server]) -> None:
    """Ends each server's process group: SIGTERM to all first, SIGKILL to what lingers."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for server in servers:
            with suppress(ProcessLookupError):
                os.killpg(server.process.pid, sign)
        for server in servers:
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(10)
