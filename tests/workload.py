"""Test support: prompts of very different shapes, clients that hang up, and what must hold of the answers."""

import http.client
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlparse

from serving import Server, tail, wait_for

FIRST_TOKEN = 3  # below it are the tiny tokenizer's special tokens


class Request(NamedTuple):
    """A prompt (token ids) and how many tokens to generate from it; `stops` lets the end token end it earlier."""

    prompt: list[int]
    max_new_tokens: int
    stops: bool = False


def random_tokens(rng: random.Random, count: int, vocab_size: int = 128) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(count)]


def mixed_requests(seed: int, *, context_length: int = 2048) -> list[Request]:
    """40 requests: lengths around page and chunk edges, a family with a shared prefix, two that fill the context."""
    rng = random.Random(seed)
    lengths = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 200, 255, 256, 257, 400, 511, 513, 700, 1100, 1600)
    prompts = [random_tokens(rng, length) for length in lengths]
    shared = random_tokens(rng, 320)
    prompts += [shared + random_tokens(rng, length) for length in (1, 2, 5, 15, 16, 17, 33, 64, 90, 120)]
    prompts += [prompts[-1] + random_tokens(rng, 3), prompts[-1][:200], prompts[-1][:339], shared]
    requests = [Request(prompt, rng.randrange(1, 49), stops=index % 4 == 0) for index, prompt in enumerate(prompts)]
    for room in (13, 40):
        requests.append(Request(random_tokens(rng, context_length - room), room - 1))
    assert len(requests) == 40
    return requests


def run_all(server: Server, requests: Sequence[Request], *, at_once: int = 16) -> list[Any]:
    """Every request's answer, greedy, in order."""

    def run(request: Request) -> Any:
        return server.generate(request.prompt, max_new_tokens=request.max_new_tokens, ignore_eos=not request.stops)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, requests))


def histogram(answers: Sequence[Any], gamma: int) -> list[int]:
    """How many verifications accepted 0, 1, ... gamma drafts, over all `answers` (requests of one token have none)."""
    total = [0] * (gamma + 1)
    for answer in answers:
        for accepted, count in enumerate(answer["meta_info"].get("spec_correct_drafts_histogram") or []):
            total[accepted] += count
    return total


def assert_same(answers: Sequence[Any], expected: Sequence[Any]) -> None:
    """Token for token, and ended for the same reason."""
    for index, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        assert answer["output_ids"] == other["output_ids"], f"request {index}"
        assert answer["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"], f"request {index}"


def hang_up(server: Server, request: Request, after_events: int) -> None:
    """Streams a request and closes the connection after `after_events` events, or at its end."""
    body = {
        "input_ids": request.prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": request.max_new_tokens, "ignore_eos": True},
        "stream": True,
    }
    connection = http.client.HTTPConnection(str(urlparse(server.url).netloc), timeout=120)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        seen = 0
        while seen < after_events and (line := response.readline()):
            seen += line.startswith(b"data:")
    finally:
        connection.close()


def assert_pool_empties(server: Server) -> None:
    """Once idle, every KV slot is free or belongs to the prefix cache, which can be dropped.

    SGLang's own check of that runs whenever the server falls idle, and ends it on a leak.
    """

    def idle() -> bool:
        load = server.get("/v1/loads")["loads"][0]
        return load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0

    wait_for(
        idle,
        deadline=time.monotonic() + 60,
        give_up=lambda: not server.alive(),
        failure=lambda: f"{server.get('/v1/loads')}\n{tail(server.log)}" if server.alive() else tail(server.log),
    )
    server.flush_cache()
    assert server.alive(), tail(server.log)


def nightjar(server: Server) -> Any:
    """Nightjar's own entry of `/server_info`."""
    return server.get("/server_info")["internal_states"][0]["nightjar"]
