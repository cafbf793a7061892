"""The levels of evidence against each other, on the same requests: throughput, TTFT, TPOT, and their ratios.

    scripts/python bench/calibrate.py --json calibrate.json
    scripts/python bench/calibrate.py --emulate 2xl20-qwen-32b --emulate-speed 0.25 --loads c16,ramp --at-once 3 ...
    scripts/python bench/calibrate.py --real --loads c1,c8,trace --trace AzureLLMInferenceTrace_conv.csv --rate 1 ...

As it stands: the simulator (L1) against the emulator (L2) of a named set-up. With `--real`, the demo pair, computed for
real on this machine (L3), against its emulator and the simulator, both of which are told what its steps took: first the
pair is served under `random` and a set-up file is made of its journal (`measured_pair.py`).

Loads, lengths, rates: `loads.py`, in the device's seconds. At `--emulate-speed` 0.25 a run takes four times as
long, and this machine's scheduler weighs a quarter.

The simulator charges `Device.step_overhead_s` for the scheduler, and a closed loop's next request is there in the very
moment of an answer. The emulator has a real scheduler and real clients. What both took is measured, and the
simulator is run again with it ("L1*"): where L1 is off and L1* is not, this machine's CPU is the reason.
"""

import argparse
import json
import shlex
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "tests")
sys.path.append(str(ROOT / "bench"))
import emulated  # noqa: E402
from contenders import Contender, running, start  # noqa: E402
from load import send  # noqa: E402
from loads import SATURATION, Rules, draw, read_lengths  # noqa: E402
from machine import machine  # noqa: E402
from measured_pair import measure_pair  # noqa: E402
from simulated import simulate  # noqa: E402
from window import window  # noqa: E402

from sglang_nightjar.emulate.set_up import find_emulated  # noqa: E402
from sglang_nightjar.simulate.acceptance import AcceptanceSpec  # noqa: E402
from sglang_nightjar.simulate.metrics import Metrics, Slo, summarize  # noqa: E402
from sglang_nightjar.simulate.protocols import Cost  # noqa: E402
from sglang_nightjar.simulate.workload import Work  # noqa: E402

FIGURES = {"tokens/s": "tokens_s", "TTFT ms": "ttft_ms", "TPOT ms": "tpot_ms"}


def main() -> None:
    options = arguments()
    levels: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as name:
        folder = Path(name)
        if options.real:
            real = argparse.Namespace(**{**vars(options), "emulate": "", "emulate_speed": 1.0, "at_once": 1})
            measure(real, "L3", levels, folder)
            options.emulate, options.acceptance = measure_pair(folder, options)
        measure(options, "L2", levels, folder)
        found = find_emulated(options.emulate)
        acceptance = emulated.read(options.acceptance)
    for (policy, load), own in levels.items():
        work = draw(load, rules_of(options))
        own["L1"] = simulated(found.forwards.cost, policy, work, acceptance)
        if load.startswith("c"):  # only there is the server never idle, and are there turnarounds
            cost = emulated.with_scheduler(found, own["L2"]["scheduler_ms"] / 1e3 * options.emulate_speed)
            own["L1*"] = simulated(cost, policy, work, acceptance, own["L2"]["turnaround_ms"] / 1e3)
    samples = [{"policy": policy, "load": load, **own} for (policy, load), own in levels.items()]
    told = {**vars(options), "set_up": options.emulate, "speed": options.emulate_speed}
    written = {"machine": machine(), "options": told, "samples": samples}
    options.json.write_text(json.dumps(written, default=str) + "\n")
    print(table(samples, against="L3" if options.real else "L1"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--real", action="store_true", help="the demo pair: computed, emulated and simulated")
    parser.add_argument("--measured", type=Path, help="with --real: where to keep the set-up file (default: nowhere)")
    parser.add_argument("--emulate", help="set-up, or a file of measured steps (default: 4090-r1-qwen-7b)")
    parser.add_argument("--emulate-speed", type=float, help="emulated s per s (default: 0.1; 0.5 with --real)")
    parser.add_argument("--acceptance", default="", help="as --nightjar-emulate-acceptance (default: the set-up's own)")
    parser.add_argument("--policies", help="default: off+no-draft,static:3,nightjar; off,static:3 with --real")
    parser.add_argument("--loads", help="default: c1,c8,c32; c1,c8 with --real")
    parser.add_argument("--at-once", type=int, default=1, help="emulated servers that run at a time")
    parser.add_argument(
        "--requests", type=int, default=0, help="of a closed loop, at least (always 6 * clients ** 0.75)"
    )
    parser.add_argument("--duration-s", type=float, default=60.0, help="of other loads, s of the device")
    parser.add_argument("--rate", type=float, help="requests/s that xS, ramp, bursts and trace multiply")
    parser.add_argument("--trace", help="file for the load `trace`")
    parser.add_argument("--lengths", help="as in bench/serving.py (default: sharegpt; 48:32 with --real)")
    parser.add_argument("--server-arguments", type=shlex.split, default=[], help="more of the server's own, in quotes")
    options = parser.parse_args()
    options.emulate = options.emulate or "4090-r1-qwen-7b"
    usual = ("off,static:3", "c1,c8", "48:32", 0.5) if options.real else (
        "off+no-draft,static:3,nightjar", "c1,c8,c32", "sharegpt", 0.1)  # fmt: skip
    for name, value in zip(("policies", "loads", "lengths", "emulate_speed"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.rate = options.rate or (1.0 if options.real else SATURATION.get(options.emulate, 1.0))
    options.acceptance = options.acceptance or emulated.usual_acceptance(options.emulate)
    return options


def rules_of(options: argparse.Namespace) -> Rules:
    return Rules(options.rate, options.duration_s, read_lengths(options.lengths), options.requests, options.trace)


def measure(
    options: argparse.Namespace, level: str, levels: dict[tuple[str, str], dict[str, Any]], folder: Path
) -> None:
    """Serves every policy under every load and adds what was found to `levels`, by (policy, load)."""
    with ExitStack() as stack:
        contenders = start(options.policies.split(","), stack, folder, options)
        for load in options.loads.split(","):
            for first in range(0, len(contenders), options.at_once):
                group = contenders[first : first + options.at_once]
                with running(group), ThreadPoolExecutor(len(group)) as pool:
                    found = pool.map(partial(serve, load=load, options=options), group)
                    for each, seen in zip(group, found, strict=True):
                        levels.setdefault((each.policy, load), {})[level] = seen
                        print(f"[calibrate] {level} {each.policy} {load} {seen}", file=sys.stderr, flush=True)


def serve(each: Contender, load: str, options: argparse.Namespace) -> dict[str, Any]:
    """One load through HTTP. `texts`: a checksum of all answers, equal for all policies."""
    speed = options.emulate_speed
    each.server.flush_cache()
    trip_s = emulated.turnaround_s(each.server, speed) if options.emulate and load.startswith("c") else 0.0
    before = each.read()
    record, answers = send(each.server.url, draw(load, rules_of(options)), speed=speed)
    after = each.read()
    found = figures(summarize(record, Slo())) | each.between(before, after)
    sent, chunks = np.array([answer.sent_s for answer in answers]), [np.array(answer.chunks_s) for answer in answers]
    rate, _ = window(sent, chunks, record.work.output, record.work.concurrency)
    found["tokens_s"] = rate / speed
    found["texts"] = zlib.crc32("".join(answer.text for answer in answers).encode())
    if "steps_by_gamma" in found:
        steps = found["steps_by_gamma"]
        found["mean_gamma"] = sum(gamma * count for gamma, count in enumerate(steps)) / max(sum(steps), 1)
    if options.emulate:
        # Between the requests of a single client the server is idle for one turnaround each.
        busy_s = record.end_s - (trip_s * found["requests"] if load == "c1" else 0.0)
        found |= emulated.shares(before.state, after.state, speed).report(busy_s, speed)
        found["turnaround_ms"] = trip_s * 1e3
    return found


def figures(metrics: Metrics) -> dict[str, float]:
    return {
        "requests": metrics.requests,
        "tokens_s": metrics.throughput,
        "makespan_tokens_s": metrics.makespan_throughput,
        "ttft_ms": metrics.ttft.mean * 1e3,
        "tpot_ms": metrics.tpot.mean * 1e3,
        "tpot_p99_ms": metrics.tpot.p99 * 1e3,
        "e2e_ms": metrics.e2e.mean * 1e3,
    }


def simulated(
    cost: Cost, policy: str, work: Work, acceptance: AcceptanceSpec, turnaround_s: float = 0.0
) -> dict[str, float]:
    metrics = simulate(cost, policy, work, acceptance, Slo(), turnaround_s=turnaround_s)
    return {**figures(metrics), "mean_gamma": metrics.mean_gamma}


def table(samples: list[dict[str, Any]], *, against: str) -> str:
    """Markdown: each figure at each level there is; the emulator's over that of level `against`, and over L1*."""
    present = [level for level in ("L3", "L2", "L1", "L1*") if any(level in sample for sample in samples)]
    ratios = [("L2", against), ("L2", "L1*")]
    heads = ["policy", "load"]
    for name in FIGURES:
        heads += [*(f"{name}, {level}" for level in present), *(f"{a}/{b}" for a, b in ratios)]
    heads += ["device's share", "scheduler, ms/step", "turnaround, ms", *(f"gamma, {level}" for level in present)]
    lines = ["| " + " | ".join(heads) + " |", "| :-- | :-- |" + " ---: |" * (len(heads) - 2)]
    for sample in samples:
        cells = [sample["policy"], sample["load"]]
        for name in FIGURES.values():
            cells += [f"{sample[level][name]:.4g}" if level in sample else "" for level in present]
            cells += [f"{sample[a][name] / sample[b][name]:.3f}" if b in sample else "" for a, b in ratios]
        seen = sample["L2"]
        cells += [f"{seen['device_share']:.1%}"]
        cells += [f"{seen[name]:.2f}" if "L1*" in sample else "" for name in ("scheduler_ms", "turnaround_ms")]
        cells += [f"{sample[level].get('mean_gamma', 0.0):.2f}" if level in sample else "" for level in present]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
