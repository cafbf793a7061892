"""The part of `gpu_check.py` that runs servers: gamma switches at random, and the draft leaves and returns under load.

It knows no device: on a CPU it does the same, which is how it is tested. On a GPU both have Nightjar's own worker.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from elastic import memory, settle  # noqa: E402
from gpu_rows import FAILED, OK, REFUSED, Row  # noqa: E402
from serving import Server, serve  # noqa: E402
from workload import nightjar  # noqa: E402

PART = "end-to-end"
MOVES = ("EVICTED", "RESIDENT") * 2
AT_ONCE, TOKENS = 8, 48
SWITCHING, MOVING = "gamma switching at random", "evict and reload under load"


def check_end_to_end(model: str, draft: str, more: Sequence[str], *, prompts: Sequence[str] | None = None) -> list[Row]:
    """Serves a pair of models twice: once with gamma switching every few steps, against a server that never drafts;
    once with the draft moved twice there and back under load, counting what clients noticed.

    Args:
        more: further arguments of the servers.
        prompts: to send again and again; None: those of the benchmarks.
    Returns:
        Rows; one that says `refused`, with the server's reason, where it cannot do this.
    """
    words = ["--model-path", model, *more]
    pair = [*words, "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
    lines = prompts or prompt_lines()
    # A move made by hand stands for the cooldown: nobody else moves the draft meanwhile.
    moving = [*pair, "--nightjar-elastic", "on", "--nightjar-cooldown-s", "3600"]
    rows = _rows(SWITCHING, lambda: switch_gamma(words, pair, lines))
    return rows + _rows(MOVING, lambda: _moved(moving, lines))


def _rows(check: str, run: Callable[[], list[Row]]) -> list[Row]:
    """What `run` finds, or that a server refused."""
    try:
        return run()
    except AssertionError as error:  # it did not come up, or a move did not end; the message has the log's end
        reason = next((line for line in str(error).splitlines() if line.startswith("error: ")), None)
        if reason is None:
            raise
        return [Row(PART, check, REFUSED, reason.removeprefix("error: "))]


def _moved(words: Sequence[str], prompts: Sequence[str]) -> list[Row]:
    with serve(*words) as server:
        return move_under_load(server, prompts)


def switch_gamma(words: Sequence[str], pair: Sequence[str], prompts: Sequence[str]) -> list[Row]:
    """The rows of a pair under `--nightjar-policy random`, and of its target alone."""
    with serve(*words, "--nightjar-policy", "off") as server:
        expected = texts(server, prompts)
    with serve(*pair, "--nightjar-policy", "random:1", "--nightjar-elastic", "off") as server:
        found = [texts(server, prompts) for _ in range(3)]  # after the first time from cached prefixes
        told = nightjar(server)
    by_gamma, switches = told["steps_by_gamma"], told["switches"]
    every = all(by_gamma)
    figure = f"steps {by_gamma}, {switches} switches between 0 and more, accept length {told['accept_length']}"
    rows = [Row(PART, f"{SWITCHING}: each gamma ran", OK if every else FAILED, figure, {"steps": by_gamma})]
    pairs = [(text, right) for run in found for text, right in zip(run, expected, strict=True)]
    same = sum(text == right for text, right in pairs)
    figure = f"{same} of {len(pairs)} equal to those of the target alone"
    rows.append(Row(PART, f"{SWITCHING}: greedy texts", OK, figure, {"same": same, "answers": len(pairs)}))
    return rows


def move_under_load(server: Server, prompts: Sequence[str]) -> list[Row]:
    """The rows of one server, whose draft is resident before and afterwards."""
    expected = texts(server, prompts)
    stop, answers, errors = threading.Event(), [], []

    def client(number: int) -> None:
        at = number
        while not stop.is_set():
            index = at % len(prompts)
            try:
                answers.append((index, texts(server, [prompts[index]])[0]))
            except Exception as error:  # any of them is a request that failed, and is counted
                errors.append(error)
            at += 1

    rows = []
    before = memory(server)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        clients = [pool.submit(client, number) for number in range(AT_ONCE)]
        try:
            for residency in MOVES:
                begin = time.perf_counter()
                settle(server, residency)
                seconds = time.perf_counter() - begin
                found = memory(server)
                figure = f"{seconds:.2f} s until every rank says so; {found['slots']} KV slots"
                rows.append(
                    Row(PART, f"to {residency} under load", OK, figure, {"seconds": seconds, "slots": found["slots"]})
                )
        finally:
            stop.set()
        for each in clients:
            each.result()
    after = memory(server)
    moved = after["evictions"] - before["evictions"], after["reloads"] - before["reloads"]
    failures = after["failures"] - before["failures"]
    good = moved == (2, 2) and not failures
    figure = f"{moved[0]} evictions, {moved[1]} reloads, {failures} failures"
    rows.append(Row(PART, "moves as counted by the server", OK if good else FAILED, figure))
    good = answers and not errors
    figure = f"{len(answers)} answered, {len(errors)} failed" + (f": {errors[0]}" if errors else "")
    rows.append(Row(PART, "requests meanwhile", OK if good else FAILED, figure, {"answers": len(answers)}))
    same = sum(text == expected[index] for index, text in answers)
    # On a GPU a batch's size changes sums, so greedy texts may differ without a fault, unless inference is
    # deterministic; on a CPU they must not.
    figure = f"{same} of {len(answers)} equal to those before"
    rows.append(Row(PART, "greedy texts", OK, figure, {"same": same, "answers": len(answers)}))
    return rows


def texts(server: Server, prompts: Sequence[str]) -> list[str]:
    """What each prompt is continued with, greedily."""
    found: list[dict[str, Any]] = server.generate_many(prompts, at_once=AT_ONCE, max_new_tokens=TOKENS)
    return [answer["text"] for answer in found]


def prompt_lines() -> list[str]:
    return (ROOT / "bench" / "prompts.txt").read_text().splitlines()[: 2 * AT_ONCE]
