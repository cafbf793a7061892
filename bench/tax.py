"""What gamma 0 costs: a decode step of a server whose draft is away, over one that never had a draft.

    scripts/python bench/tax.py --json tax.json

Both servers stay up and take turns every few dozen steps. A step's time is what lies between two
tokens of one stream while `batch` requests decode together; a turn counts with the median of its
steps, and the result is the median over the turns of the ratio of two neighbouring turns.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--batches", default="1,8,32", help="requests that decode together")
    parser.add_argument("--turns", type=int, default=12, help="turns of each server at each batch size")
    parser.add_argument("--tokens", type=int, default=36, help="tokens per request and turn")
    options = parser.parse_args()

    result: dict[str, Any] = {"machine": machine(), "rows": []}
    with serve_all([(*OFF, *POOL), (*WORDS, *POOL)]) as (off, away):
        for server in (off, away):
            turn(server, 4, options.tokens)
        send_away(away)
        for batch in map(int, options.batches.split(",")):
            pairs = []
            for number in range(options.turns):
                order = (off, away) if number % 2 == 0 else (away, off)
                taken = {server: turn(server, batch, options.tokens) for server in order}
                pairs.append((taken[off], taken[away]))
            row = {
                "batch": batch,
                "off_ms": statistics.median(plain for plain, _ in pairs),
                "away_ms": statistics.median(own for _, own in pairs),
                "ratios": sorted(own / plain for plain, own in pairs),
            }
            row["ratio"] = statistics.median(row["ratios"])
            result["rows"].append(row)
            print(f"[bench] {row}", file=sys.stderr, flush=True)
        require_away(away)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(tax(result))


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
