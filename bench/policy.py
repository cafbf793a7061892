"""What deciding and learning cost per decode iteration, for every policy.

    scripts/python bench/policy.py --json policy.json

Each policy meets the same synthetic server: batch sizes that wander between 1 and 128, noisy
steps, a draft that lags while it is off. `decide`, `observe` and both together are timed in
every iteration after a warm-up, and both together in the first 500 too, while most is still to be
learned; figures are microseconds, of `time.perf_counter_ns`. Its own cost is subtracted. Compare
them within one run only.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# In place of this script's folder, where `platform.py` would shadow the standard library's.
sys.path[0] = str(ROOT / "tests")
sys.path.insert(1, str(ROOT))
sys.path.append(str(ROOT / "bench"))  # last: platform.py there would hide the standard library's
from baseline_world import World  # noqa: E402
from evidence.parts import deciding  # noqa: E402
from machine import machine  # noqa: E402

from sglang_nightjar.policy.base import Observation, State  # noqa: E402
from sglang_nightjar.policy.registry import PolicyOptions, make_policy, parse_policy  # noqa: E402

POLICIES = ("nightjar", "paper", "off", "static:3", "sglang-ema", "dsd", "banditspec-ucb", "banditspec-exp3", "tetris")
CONTEXT = 400  # KV tokens of a request
WARM_UP = 2000  # steps
EARLY = 500  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--max-gamma", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()

    rows = [bench(name, options.steps, options.max_gamma) for name in options.policies.split(",")]
    # Of other processes too: above the number of cores, figures are too high.
    about = {**machine(), "load": os.getloadavg()[0]}
    result = {"machine": about, "steps": options.steps, "max_gamma": options.max_gamma, "policies": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(report(result))


def bench(name: str, steps: int, max_gamma: int) -> dict[str, Any]:
    """Median and 99th percentile of the microseconds of `decide`, of `observe` and of both."""
    policy = make_policy(parse_policy(name, max_gamma=max_gamma), PolicyOptions(max_gamma))
    # At this price of a token, the best gamma falls from `max_gamma` at 1 request to 0 at about 100.
    world, draw = World(0.7, draft_s=0.001, token_s=5e-4, noise=0.1), random.Random(1)
    own = clock_ns()
    now_s, lag, size = 0.0, 0, 16
    taken: dict[str, list[float]] = {"decide": [], "observe": [], "both": [], "early": []}
    for step in range(WARM_UP + steps):
        if draw.random() < 0.05:
            size = min(128, max(1, size + draw.randint(-8, 8)))
        state = State(now_s, size, size * CONTEXT, max_lag=lag)
        begin = time.perf_counter_ns()
        gamma = policy.decide(state)
        decided = time.perf_counter_ns() - begin - own
        seen = catch_up(world.step(state, gamma), lag)
        begin = time.perf_counter_ns()
        policy.observe(seen)
        observed = time.perf_counter_ns() - begin - own
        if step < EARLY:
            taken["early"].append(max(decided + observed, 0) / 1e3)
        if step >= WARM_UP:
            for key, value in (("decide", decided), ("observe", observed), ("both", decided + observed)):
                taken[key].append(max(value, 0) / 1e3)
        lag = 0 if gamma else min(lag + 1, CONTEXT)
        now_s += seen.seconds
    row: dict[str, Any] = {"policy": name}
    for key, values in taken.items():
        row[f"{key}_median_us"] = statistics.median(values)
        row[f"{key}_p99_us"] = statistics.quantiles(values, n=100)[98]
    print(f"[bench] {row}", file=sys.stderr, flush=True)
    return row


def clock_ns() -> int:
    """What reading the clock takes, ns."""
    return min(-time.perf_counter_ns() + time.perf_counter_ns() for _ in range(10_000))


def catch_up(seen: Observation, lag: int) -> Observation:
    """The step with the time in which the draft read what it lagged."""
    if not (seen.gamma and lag):
        return seen
    tokens = lag * seen.batch_size
    seconds = 0.002 + 2e-6 * tokens
    return replace(seen, seconds=seen.seconds + seconds, catchup_seconds=seconds, catchup_tokens=tokens)


def report(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    about = result["machine"]
    where = f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f}, {about['date']}"
    return f"{where}, commit {about['commit']}\n\n{deciding(result)}"


if __name__ == "__main__":
    main()
