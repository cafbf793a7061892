"""Whether every policy gives the texts of a server without speculation, with the draft leaving and returning.

    scripts/python bench/lossless.py --json lossless.json
    scripts/python bench/lossless.py --emulate 2xl20-qwen-32b --policies nightjar,random:3 --requests 10000 ...

On an emulated device at many times its speed: what follows a context is a hash that lives in the KV cache, so a slot
that was lost, is stale or was moved to the wrong place changes the text (docs/emulation.md). The same requests, a third
of which go on from one of a few shared prefixes, go to every policy; the pool beside the draft is so small that cached
prefixes fill it, and the draft is driven out and back as often as it can. What is counted: answers, those that differ
from the text of `off`, and how often the draft left and returned meanwhile.
"""

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "tests")
sys.path.append(str(ROOT / "bench"))
from elastic import memory, settle  # noqa: E402
from emulated import state  # noqa: E402
from machine import machine  # noqa: E402
from serving import Server, serve  # noqa: E402
from workload import Request, assert_pool_empties, run_all  # noqa: E402

from sglang_nightjar.emulate.vocabulary import FIRST, FIRST_DOMAIN, VOCABULARY  # noqa: E402

REFERENCE = "off"
POLICIES = "static:1,static:3,static:5,sglang-ema,dsd,banditspec-ucb,paper,nightjar,random:3"
_PREFIXES, _LONGEST_PREFIX = 16, 240
_STAY_S = 0.3  # wall seconds the draft is left where it is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--emulate", default="4090-r1-qwen-7b", help="set-up, as --nightjar-emulate")
    parser.add_argument("--emulate-speed", type=float, default=20.0)
    parser.add_argument("--policies", default=POLICIES, help=f"compared with {REFERENCE}")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--slots", type=int, default=8192, help="KV slots beside the draft")
    options = parser.parse_args()

    made = requests(options.requests)
    expected, rows = run(REFERENCE, made, options)[0], []
    for policy in options.policies.split(","):
        texts, row = run(policy, made, options)
        rows.append({"policy": policy, "requests": len(texts), "tokens": sum(map(len, texts)), **row})
        rows[-1]["mismatches"] = sum(a != b for a, b in zip(texts, expected, strict=True))
        print(f"[lossless] {rows[-1]}", file=sys.stderr, flush=True)
        options.json.write_text(json.dumps({"machine": machine(), "options": vars(options), "rows": rows}, default=str))
    heads = ("policy", "requests", "tokens", "mismatches", "evictions", "reloads", "moved_slots", "catchup_tokens")
    print("| " + " | ".join(heads) + " |\n| :-- |" + " ---: |" * (len(heads) - 1))
    print("\n".join("| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows))
    if any(row["mismatches"] for row in rows):
        raise SystemExit("answers differ")


def requests(count: int) -> list[Request]:
    """Short ones, so that many fit the time; a third goes on from a shared prefix, cached by whoever was first."""
    rng = random.Random(11)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(FIRST, len(VOCABULARY)) for _ in range(number)]

    shared = [tokens(_LONGEST_PREFIX) for _ in range(_PREFIXES)]
    made = []
    for index in range(count):
        prefix = rng.choice(shared)[: rng.randrange(20, _LONGEST_PREFIX)] if index % 3 == 0 else []
        prompt = [FIRST_DOMAIN + index % 2, *prefix, *tokens(rng.randrange(1, 120))]
        made.append(Request(prompt, rng.randrange(8, 64)))
    return made


def run(policy: str, made: list[Request], options: argparse.Namespace) -> tuple[list[list[int]], dict[str, Any]]:
    """Output tokens of each request under `policy`, and what happened to the draft meanwhile."""
    words: list[Any] = ["--nightjar-emulate", options.emulate, "--nightjar-emulate-speed", options.emulate_speed]
    words += ["--nightjar-policy", policy, "--max-running-requests", 64]
    moves = policy != REFERENCE
    if moves:
        words += ["--nightjar-elastic", "on", "--nightjar-cooldown-s", 3600, "--max-total-tokens", options.slots]
    with serve(*words) as server:
        before, began = state(server), time.perf_counter()
        answers: list[Any] = []
        load = threading.Thread(target=lambda: answers.extend(run_all(server, made, at_once=options.clients)))
        load.start()
        while moves and load.is_alive():
            drive(server, load)
        load.join()
        if len(answers) != len(made):
            raise SystemExit(f"{policy}: requests failed; see above, and {server.log}")
        row: dict[str, Any] = {"seconds": time.perf_counter() - began}
        assert_pool_empties(server)
        if moves:
            own = state(server)["nightjar"]
            row |= {name: own["memory"][name] for name in ("evictions", "reloads", "failures", "moved_slots")}
            row["catchup_tokens"] = own["catchup_tokens"] - before["nightjar"]["catchup_tokens"]
            row["steps_by_gamma"] = own["steps_by_gamma"]
        return [answer["output_ids"] for answer in answers], row


def drive(server: Server, load: threading.Thread) -> None:
    """Out and back once."""
    for residency in ("EVICTED", "RESIDENT"):
        settle(server, residency)
        if not load.is_alive():
            return
        time.sleep(_STAY_S)
    assert memory(server)["failures"] == 0, memory(server)


if __name__ == "__main__":
    main()
