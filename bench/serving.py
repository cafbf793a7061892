"""Policies under load, through HTTP: throughput, latency, goodput, accept length, memory, gamma over time.

    scripts/python bench/serving.py --json serving.json --plot serving.png
    scripts/python bench/serving.py --emulate 4090-r1-qwen-7b --emulate-speed 0.1 --at-once 8 --json l2.json \\
        --policies off,off+no-draft,static:3,nightjar+elastic:off,nightjar --loads c8,c32,c128,x0.7,ramp

Without `--emulate` the demo pair is served for real (evidence level L3); with it, a named set-up on an emulated device
(L2, docs/emulation.md), and all times and rates, `--rate` and `--duration-s` too, are the device's.

Every policy gets a server of its own, started for this run, so that each learns from nothing and keeps what it
learns. `--at-once` servers run at a time; the others are stopped (SIGSTOP) and take turns load by load, in another
order each time, so that what is compared ran within a minute or two on a machine whose speed drifts. On an emulated
device that is much slower than real, many at once hardly meet: most of their time is waiting.

A policy may carry options: `nightjar+elastic:off` is nightjar with `--nightjar-elastic off`. On an emulated device
`off` has the KV slots that a loaded draft would leave it, and `off+no-draft` those of the whole memory.

Loads: `loads.py`. The client is `sglang.bench_serving` (`client.py`). Figures are medians over the repeats; compare
them within one run only. The policies' answers are compared request by request, and those that
differ are counted.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "tests")
sys.path.append(str(ROOT / "bench"))
import emulated  # noqa: E402
from client import Run  # noqa: E402
from contenders import Contender, running, start  # noqa: E402
from loads import SATURATION, Rules, at_least, draw, read_lengths  # noqa: E402
from machine import machine  # noqa: E402
from prompts import TEMPLATE, write_random, write_real  # noqa: E402
from serving_report import moves_table, plot, summary  # noqa: E402
from simulated import simulate  # noqa: E402
from timeline import draw as draw_run  # noqa: E402

from sglang_nightjar.emulate.set_up import Emulated, find_emulated  # noqa: E402
from sglang_nightjar.simulate.metrics import Metrics, Slo  # noqa: E402
from sglang_nightjar.simulate.workload import Fixed, Work  # noqa: E402

POLICIES = "off,static:1,static:3,static:5,sglang-ema,dsd,banditspec-ucb,banditspec-exp3,nightjar"
LOADS = "c1,c4,c16,c48,ramp"
EMULATED_POLICIES = (
    "off,off+no-draft,static:1,static:3,static:5,sglang-ema,dsd,banditspec-ucb,paper,nightjar+elastic:off,nightjar"
)
EMULATED_LOADS = "c1,c8,c32,c128,x0.5,x1.0,ramp,bursts"
# `throughput` and `goodput` are of the time while requests came, the others with `_` of the whole run.
METRICS = ("throughput", "window_s", "goodput", "slo_attainment", "output_throughput", "request_goodput")
METRICS += tuple(f"{middle}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2e_latency")
                 for middle in ("mean", "median", "p99"))  # fmt: skip


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as at Ctrl-C, servers are stopped on the way out
    os.environ["HF_HUB_OFFLINE"] = "1"  # it would look the served name up on the hub; read when it is imported
    import sglang.bench_serving  # noqa: F401  # once, for all the forks that run it

    loads = options.loads.split(",")
    rules = {load: rules_of(load, options) for load in loads}
    for load in loads:
        draw(load, rules[load])  # a mistake in a name is found now
    samples: list[dict[str, Any]] = []
    told = {**vars(options), "set_up": options.emulate, "speed": options.emulate_speed}
    result: dict[str, Any] = {"level": "L2" if options.emulate else "L3", "options": told}
    result |= {"machine": machine(), "samples": samples}
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        contenders = start(options.policies.split(","), stack, folder, options)
        for turn, (repeat, load) in enumerate(product(range(options.repeats), loads)):
            first = turn % len(contenders)
            order = contenders[first:] + contenders[:first]
            for start_at in range(0, len(order), options.at_once):
                group = order[start_at : start_at + options.at_once]
                samples += measure(group, load, repeat, rules[load], folder, options)
                options.json.write_text(json.dumps(result, default=str) + "\n")
        result["servers"] = {each.policy: each.whole_run(options.journals) for each in contenders}
    options.json.write_text(json.dumps(result, default=str) + "\n")  # the simulator may take minutes, and be stopped
    if options.emulate:
        add_simulated(samples, rules, options)
    options.json.write_text(json.dumps(result, default=str) + "\n")
    print(summary(samples))
    print(moves_table({policy: known["moves"] for policy, known in result["servers"].items()}))
    if options.plot:
        plot(result, options.plot)
        for policy, known in result["servers"].items():
            if known["timeline"]:
                draw_run(
                    known["timeline"], known["moves"], options.plot.with_stem(f"{options.plot.stem}-{policy}"), policy
                )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="PNG of throughput by load; one more per server, over time")
    parser.add_argument("--policies")
    parser.add_argument("--loads")
    parser.add_argument("--repeats", type=int, help="default: 3, or 1 with --emulate")
    parser.add_argument("--emulate", default="", help="set-up to emulate, as --nightjar-emulate")
    parser.add_argument("--emulate-speed", type=float, default=0.1, help="emulated seconds per second (default: 0.1)")
    parser.add_argument("--acceptance", default="", help="as --nightjar-emulate-acceptance (default: the set-up's own)")
    parser.add_argument("--at-once", type=int, default=1, help="servers that run at a time")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens a real model generates per request")
    parser.add_argument("--lengths", default="sharegpt", help="of an emulated model's requests (`loads.py`)")
    parser.add_argument(
        "--requests", type=int, default=0, help="of a closed loop, at least (always 6 * clients ** 0.75)"
    )
    parser.add_argument("--rate", type=float, help="requests/s that xS, ramp, bursts and trace multiply (default: what "
                        "the set-up can serve at most, by the simulator; 1 for the demo pair)")  # fmt: skip
    parser.add_argument("--duration-s", type=float, help="of an open loop (default: 150, or 60 with --emulate)")
    parser.add_argument("--dataset", type=Path, help="prompts: SpecBench JSONL or one prompt per line (default: ours)")
    parser.add_argument("--trace", help="file for the load `trace`")
    parser.add_argument("--journals", type=Path, help="folder to keep the servers' journals in")
    parser.add_argument("--slo", nargs=2, type=float, metavar=("TTFT_MS", "TPOT_MS"),
                        help="for goodput (default: 2000 400, or the set-up's own)")  # fmt: skip
    parser.add_argument("--may-end", action="store_true", help="requests end at the end token, as most clients' do, "
                        "not only at their length: SGLang then admits more than there may be room for")  # fmt: skip
    parser.add_argument("--server-arguments", type=shlex.split, default=[], help="more of the server's own, in quotes")
    options = parser.parse_args()
    options.policies = options.policies or (EMULATED_POLICIES if options.emulate else POLICIES)
    options.loads = options.loads or (EMULATED_LOADS if options.emulate else LOADS)
    options.repeats = options.repeats or (1 if options.emulate else 3)
    options.rate = options.rate or SATURATION.get(options.emulate, 1.0)
    options.duration_s = options.duration_s or (60.0 if options.emulate else 150.0)
    options.acceptance = options.acceptance or emulated.usual_acceptance(options.emulate)
    if not options.emulate:
        options.emulate_speed = 1.0
    return options


def rules_of(load: str, options: argparse.Namespace) -> Rules:
    lengths = read_lengths(options.lengths) if options.emulate else Fixed(1, options.max_tokens)
    return Rules(options.rate, options.duration_s, lengths, options.requests, options.trace)


def slo_of(options: argparse.Namespace) -> Slo:
    if options.slo:
        return Slo(options.slo[0] / 1e3, options.slo[1] / 1e3)
    return emulated.slo(find_emulated(options.emulate)) if options.emulate else Slo(2.0, 0.4)


def requests_of(load: str, rules: Rules, repeat: int, options: argparse.Namespace) -> Work:
    work = draw(load, rules, repeat)
    return at_least(work, TEMPLATE + 1) if options.emulate else work


def measure(
    group: list[Contender], load: str, repeat: int, rules: Rules, folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One load, sent to all of `group` at the same time; a sample of each."""
    work = requests_of(load, rules, repeat, options)
    path = folder / "requests.jsonl"
    if options.emulate:
        write_random(work, path, repeat)
    else:
        write_real(work, path, repeat, options.dataset, exact=load == "trace")
    with running(group):
        trips = trips_s(group, load, options)
        before = [each.read() for each in group]
        runs = [
            Run(each.server, path, work, speed=options.emulate_speed, slo=slo_of(options), folder=folder,
                name=f"client-{number}", may_end=options.may_end)
            for number, each in enumerate(group)
        ]  # fmt: skip
        results = [run.result() for run in runs]
        after = [each.read() for each in group]
    samples = []
    for each, result, trip_s, *readings in zip(group, results, trips, before, after, strict=True):
        sample = {"policy": each.policy, "load": load, "repeat": repeat, "requests": result["completed"]}
        sample |= {"seconds": result["duration"]} | {name: result[name] for name in METRICS}
        sample |= each.between(*readings)
        if options.emulate:
            spent = emulated.shares(readings[0].state, readings[1].state, options.emulate_speed)
            idle_s = trip_s * result["completed"] if load == "c1" else 0.0  # a single client's server waits for it
            sample |= spent.report(result["duration"] - idle_s, options.emulate_speed)
            sample["turnaround_ms"] = trip_s * 1e3
        print(f"[bench] {sample}", file=sys.stderr, flush=True)
        samples.append({**sample, "answers": result["answers"]})
    return samples


def trips_s(group: list[Contender], load: str, options: argparse.Namespace) -> list[float]:
    """Of each server a client's turnaround, emulated s, where the load is a closed loop on an emulated device."""
    if not options.emulate or draw(load, rules_of(load, options)).concurrency is None:
        return [0.0] * len(group)
    return [emulated.turnaround_s(each.server, options.emulate_speed) for each in group]


def add_simulated(samples: list[dict[str, Any]], rules: dict[str, Rules], options: argparse.Namespace) -> None:
    """Beside each sample what the simulator makes of the same requests: `L1`; and of a closed loop, whose server is
    never idle, with the scheduler's and the clients' time as measured: `L1*`."""
    found: Emulated = find_emulated(options.emulate)
    acceptance, slo, may_end = emulated.read(options.acceptance), slo_of(options), options.may_end
    for sample in samples:
        work = requests_of(sample["load"], rules[sample["load"]], sample["repeat"], options)
        policy = sample["policy"]
        sample["L1"] = figures(simulate(found.forwards.cost, policy, work, acceptance, slo, may_end=may_end))
        if work.concurrency is not None:
            cost = emulated.with_scheduler(found, sample["scheduler_ms"] / 1e3 * options.emulate_speed)
            trip_s = sample["turnaround_ms"] / 1e3
            sample["L1*"] = figures(simulate(cost, policy, work, acceptance, slo, turnaround_s=trip_s, may_end=may_end))


def figures(metrics: Metrics) -> dict[str, float]:
    """The simulator's, under the names of a sample's."""
    return {
        "throughput": metrics.throughput,
        "goodput": metrics.goodput,
        "output_throughput": metrics.makespan_throughput,
        "mean_ttft_ms": metrics.ttft.mean * 1e3,
        "mean_tpot_ms": metrics.tpot.mean * 1e3,
        "mean_e2e_latency_ms": metrics.e2e.mean * 1e3,
        "mean_gamma": metrics.mean_gamma,
        "evictions": metrics.evictions,
    }


if __name__ == "__main__":
    main()
