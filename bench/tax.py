"""What gamma 0 costs: a decode step of a server whose draft is away, over one that never had a draft.

    scripts/python bench/tax.py --json tax.json

Both servers of a pair stay up and take turns every few dozen steps. A step's time is what lies between two
tokens of one stream while `batch` requests decode together; a turn counts with the median of its
steps, and a pair of servers with the median over its turns of the ratio of two neighbouring ones. The result is the
median over several pairs, each started anew: one process may be some percent faster than another of the same
program for as long as it lives, so more turns of one pair would not settle it.
"""

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "tests")  # in place of this script's folder, whose platform.py would shadow the library's
sys.path.append(str(ROOT / "bench"))
from away import WORDS, require_away, send_away  # noqa: E402
from evidence.parts import tax  # noqa: E402
from machine import machine  # noqa: E402
from serving import Server, serve_all  # noqa: E402

POOL = ("--max-total-tokens", 6144, "--stream-interval", 1)
OFF = ("--nightjar-policy", "off")
SKIPPED = 4  # first tokens of a stream: the prefill, and steps in which the batch is still filling
Turns = list[tuple[float, float]]  # ms per step, of neighbouring turns: without a draft, and with one that is away


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--batches", default="1,8,32", help="requests that decode together")
    parser.add_argument("--pairs", type=int, default=6, help="of servers, one after the other")
    parser.add_argument("--turns", type=int, default=6, help="of each server at each batch size")
    parser.add_argument("--tokens", type=int, default=36, help="tokens per request and turn")
    options = parser.parse_args()

    batches = list(map(int, options.batches.split(",")))
    taken: dict[int, list[Turns]] = {batch: [] for batch in batches}
    result: dict[str, Any] = {"machine": machine()}
    for _ in range(options.pairs):
        for batch, turns in pair(batches, options.turns, options.tokens).items():
            taken[batch].append(turns)
        result["rows"] = [row(batch, pairs) for batch, pairs in taken.items()]
        print(f"[bench] {result['rows']}", file=sys.stderr, flush=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(tax(result))


def pair(batches: list[int], turns: int, tokens: int) -> dict[int, Turns]:
    """The turns of two fresh servers at each batch size."""
    found: dict[int, Turns] = {}
    with serve_all([(*OFF, *POOL), (*WORDS, *POOL)]) as (off, away):
        for server in (off, away):
            turn(server, 4, tokens)
        send_away(away)
        for batch in batches:
            found[batch] = []
            for number in range(turns):
                order = (off, away) if number % 2 == 0 else (away, off)
                taken = {server: turn(server, batch, tokens) for server in order}
                found[batch].append((taken[off], taken[away]))
        require_away(away)
    return found


def row(batch: int, pairs: list[Turns]) -> dict[str, Any]:
    """The figures of one batch size."""
    ratios = sorted(statistics.median(own / plain for plain, own in turns) for turns in pairs)
    return {
        "batch": batch,
        "off_ms": statistics.median(plain for turns in pairs for plain, _ in turns),
        "away_ms": statistics.median(own for turns in pairs for _, own in turns),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def turn(server: Server, batch: int, tokens: int) -> float:
    """Milliseconds per decode step, median of one turn."""
    server.flush_cache()
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    others = [
        threading.Thread(target=server.generate, args=(f"Story number {index}.",), kwargs=sampling)
        for index in range(batch - 1)
    ]
    for thread in others:
        thread.start()
    body = json.dumps({"text": "A story to time.", "stream": True, "sampling_params": sampling}).encode()
    request = urllib.request.Request(server.url + "/generate", body, {"Content-Type": "application/json"})
    times = []
    with urllib.request.urlopen(request, timeout=300) as response:
        times = [time.perf_counter() for line in response if line.startswith(b"data: {")]
    for thread in others:
        thread.join()
    gaps = [after - before for before, after in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)]
    return 1e3 * statistics.median(gaps)


if __name__ == "__main__":
    main()
