"""Policies under load, on real servers: throughput, latency, accept length, gamma over time.

    scripts/python bench/serving.py --json serving.json --plot serving.png
    scripts/python bench/serving.py --policies off,static:3,nightjar --loads c1,c16,ramp --repeats 2

Every repeat starts a fresh server per policy, so that each learns from nothing, and takes the
policies in another order. A policy may carry options: `nightjar+elastic:off` is nightjar with
`--nightjar-elastic off`. The load comes from `sglang.bench_serving`. A load is a list of
segments: `cN` keeps N requests in flight, `rR` sends R requests/s (Poisson), `ramp` and `bursts`
follow one another's rates, `trace` replays the arrivals and lengths of `--trace FILE` (Azure's
CSV format). Figures are medians over the repeats; compare them within one run only.
"""

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import runpy
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT / "tests")
from serving import Server, serve  # noqa: E402
from workload import nightjar  # noqa: E402

sys.path.append(str(ROOT / "bench"))
from journals import moves, timeline  # noqa: E402

from sglang_nightjar.observe.journal import read_journal  # noqa: E402

POLICIES = "off,static:1,static:3,static:5,sglang-ema,dsd,banditspec-ucb,banditspec-exp3,nightjar"
LOADS = "c1,c4,c16,c48,ramp"
METRICS = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms",
           "p99_itl_ms", "mean_e2e_latency_ms", "p99_e2e_latency_ms", "request_goodput")  # fmt: skip
RAMP = (0.25, 0.75, 1.5, 0.75, 0.25)  # of --rate, a segment each
BURSTS = (0.25, 2.0, 0.25, 2.0, 0.25)
WORDS = ("--max-total-tokens", 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="PNG of throughput by load, and gamma over time (needs matplotlib)")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens generated per request")
    parser.add_argument("--rate", type=float, default=1.0, help="requests/s that `ramp` and `bursts` multiply")
    parser.add_argument("--segment-s", type=float, default=30.0, help="length of a segment, s")
    parser.add_argument("--dataset", type=Path, help="prompts: SpecBench JSONL or one prompt per line (default: ours)")
    parser.add_argument("--trace", type=Path, help="Azure trace for the load `trace`")
    parser.add_argument("--journals", type=Path, help="folder to keep the servers' journals in")
    parser.add_argument("--slo", nargs="*", default=["ttft:2000", "tpot:400"], help="for goodput, ms")
    parser.add_argument("--server-arguments", type=shlex.split, default=[], help="more of the server's own, in quotes")
    options = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"  # it would look the served name up on the hub; read when it is imported
    import sglang.bench_serving  # noqa: F401  # once, for all the forks that run it

    policies = options.policies.split(",")
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as folder:
        prompts = write_prompts(options.dataset, Path(folder))
        for repeat in range(options.repeats):
            order = policies[repeat % len(policies) :] + policies[: repeat % len(policies)]
            for policy in order:
                journal = Path(folder) / f"journal-{repeat}-{policy.replace(':', '-')}"
                name, *settings = policy.split("+")
                words = ["--nightjar-policy", name, *WORDS, *options.server_arguments]
                for setting in settings:
                    option, _, value = setting.partition(":")
                    words += [f"--nightjar-{option}", value]
                if policy != "off":
                    words += ["--nightjar-journal", journal]
                with serve(*words) as server:
                    server.generate("Warm up.", max_new_tokens=8)
                    for load in options.loads.split(","):
                        samples.append(run_load(server, policy, load, repeat, prompts, options, Path(folder)))
                        print(f"[bench] {samples[-1]}", file=sys.stderr, flush=True)
                    samples[-1]["retractions"] = server.log.read_text(errors="replace").count("Retract requests")
                records = read_journal(journal) if journal.exists() else []
                samples[-1] |= {"timeline": timeline(records), "moves": moves(records)}
                if options.journals and journal.exists():
                    shutil.copy(journal, options.journals)
                options.json.write_text(json.dumps({"options": vars(options), "samples": samples}, default=str) + "\n")
    table = summary(samples)
    print(table)
    if options.plot:
        plot(samples, options.plot)


def segments(load: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Each segment's requests in flight or rate, and number of requests."""
    if load[0] == "c" and load[1:].isdigit():
        count = int(load[1:])
        return [{"concurrency": count, "requests": max(6, count * 3 // 2)}]
    rates = {"ramp": RAMP, "bursts": BURSTS}.get(load)
    if rates is None:
        rates = (float(load.removeprefix("r")) / options.rate,)
    return [
        {"rate": share * options.rate, "requests": max(2, round(share * options.rate * options.segment_s))}
        for share in rates
    ]


def run_load(
    server: Server, policy: str, load: str, repeat: int, prompts: Path, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """One policy under one load: each metric, weighted by the segments' requests."""
    before = nightjar(server) if policy != "off" else None
    results = []
    if load == "trace":
        results.append(bench(server, ["--dataset-name", "mooncake", "--dataset-path", write_trace(options, folder),
                                      "--use-trace-timestamps"], 64, options, folder))  # fmt: skip
    else:
        for number, segment in enumerate(segments(load, options)):
            words: list[Any] = ["--dataset-name", "custom", "--dataset-path", prompts, "--apply-chat-template"]
            words += ["--sharegpt-output-len", options.max_tokens, "--seed", 100 * repeat + number]
            if "concurrency" in segment:
                words += ["--max-concurrency", int(segment["concurrency"])]
            else:
                words += ["--request-rate", segment["rate"]]
            results.append(bench(server, words, int(segment["requests"]), options, folder))
    total = sum(result["completed"] for result in results)
    merged = {
        name: sum(result[name] * result["completed"] for result in results) / total
        for name in METRICS
        if all(name in result for result in results)
    }
    seconds = sum(result["duration"] for result in results)
    merged["output_throughput"] = sum(result["total_output_tokens"] for result in results) / seconds
    sample: dict[str, Any] = {"policy": policy, "load": load, "repeat": repeat, "seconds": seconds, **merged}
    if before is not None:
        after = nightjar(server)
        sample["accept_length"] = after["accept_length"]
        sample["steps_by_gamma"] = [
            b - a for a, b in zip(before["steps_by_gamma"], after["steps_by_gamma"], strict=True)
        ]
        sample["switches"] = after["switches"] - before["switches"]
    return sample


def bench(server: Server, words: list[Any], requests: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One call of `sglang.bench_serving`; its JSON line."""
    output, log = folder / "bench.jsonl", folder / "bench.log"
    output.unlink(missing_ok=True)
    port = server.url.rsplit(":", 1)[1]
    tokenizer = server.get("/model_info")["tokenizer_path"]
    command = ["bench_serving", "--backend", "sglang-oai-chat", "--host", "127.0.0.1", "--port", port,
               "--tokenizer", tokenizer, "--num-prompts", str(requests), "--output-file", str(output),
               "--disable-tqdm", "--warmup-requests", "0", "--flush-cache",
               "--goodput", *options.slo, *map(str, words)]  # fmt: skip
    # A fork of this process, which has imported it all: each start would cost more than many a load.
    child = multiprocessing.get_context("fork").Process(target=run_bench_serving, args=(command, log))
    child.start()
    child.join()
    if child.exitcode != 0 or not output.exists():
        raise SystemExit(f"bench_serving failed:\n{log.read_text()[-3000:]}")
    result: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    if result["completed"] != requests:
        raise SystemExit(f"{result['completed']} of {requests} requests were answered; see {server.log}")
    return result


def run_bench_serving(command: list[str], log: Path) -> None:
    """`python -m sglang.bench_serving` in this process."""
    sys.argv = command
    with log.open("w") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)


def write_prompts(dataset: Path | None, folder: Path) -> Path:
    """Conversations in the form `bench_serving` reads: our own prompts, SpecBench's first turns, or lines."""
    source = dataset or ROOT / "bench" / "prompts.txt"
    prompts = []
    for line in source.read_text().splitlines():
        prompts.append(json.loads(line)["turns"][0] if source.suffix == ".jsonl" else line)
    path = folder / "prompts.jsonl"
    with path.open("w") as file:
        for prompt in prompts * (1 + 400 // len(prompts)):
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "x"}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return path


def write_trace(options: argparse.Namespace, folder: Path) -> Path:
    """The first minutes of an Azure trace as Mooncake JSONL: time in ms, lengths divided by 8 to fit the demo."""
    if options.trace is None:
        raise SystemExit("the load `trace` needs --trace FILE")
    path = folder / "trace.jsonl"
    with options.trace.open() as file, path.open("w") as out:
        first = None
        for number, row in enumerate(csv.DictReader(file)):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            milliseconds = (at - first).total_seconds() * 1e3
            if number >= 64:
                break
            lengths = {"input_length": max(1, int(row["ContextTokens"]) // 8)}
            lengths["output_length"] = max(2, int(row["GeneratedTokens"]) // 8)
            out.write(json.dumps({"timestamp": milliseconds, "hash_ids": [number], **lengths}) + "\n")
    return path


def summary(samples: list[dict[str, Any]]) -> str:
    """Medians over the repeats as Markdown, one table per load."""
    lines = [time.strftime("%Y-%m-%d")]
    for load in dict.fromkeys(sample["load"] for sample in samples):
        heads = ("policy", "tokens/s", "TTFT ms", "p99", "TPOT ms", "p99", "E2E ms", "p99", "accept length")
        lines += ["", f"**{load}**", "", "| " + " | ".join((*heads, "steps by gamma", "switches")) + " |"]
        lines.append("| :-- |" + " ---: |" * 8 + " :-- | ---: |")
        for policy in dict.fromkeys(sample["policy"] for sample in samples):
            own = [sample for sample in samples if (sample["load"], sample["policy"]) == (load, policy)]
            if not own:
                continue

            def middle(name: str, own: list[dict[str, Any]] = own) -> str:
                values = [sample[name] for sample in own if sample.get(name) is not None]
                return f"{statistics.median(values):.1f}" if values else ""

            names = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms",
                     "mean_e2e_latency_ms", "p99_e2e_latency_ms", "accept_length")  # fmt: skip
            steps = " ".join(map(str, own[-1].get("steps_by_gamma", [])))
            cells = " | ".join(middle(name) for name in names)
            lines.append(f"| {policy} | {cells} | {steps} | {middle('switches')} |")
    return "\n".join(lines)


def plot(samples: list[dict[str, Any]], path: Path) -> None:
    """Throughput by load and policy; below, batch, gamma and pool over time of the last run that has a journal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(9, 10))
    loads = list(dict.fromkeys(sample["load"] for sample in samples))
    for policy in dict.fromkeys(sample["policy"] for sample in samples):
        values = [
            statistics.median(s["output_throughput"] for s in samples if (s["policy"], s["load"]) == (policy, load))
            for load in loads
        ]
        top.plot(loads, values, marker="o", label=policy)
    top.set_ylabel("output tokens/s")
    top.legend(fontsize="small")
    timed = [sample for sample in samples if sample.get("timeline")]
    if timed:
        times, batches, gammas, slots, residencies = zip(*timed[-1]["timeline"], strict=True)
        seconds = [at - times[0] for at in times]
        middle.plot(seconds, batches, label="batch size")
        middle.step(seconds, gammas, label="gamma")
        bottom.plot(seconds, slots, label="KV slots")
        away = bottom.twinx()
        away.step(seconds, residencies, color="tab:red", label="residency")
        away.set_yticks(range(4), ["resident", "evicting", "evicted", "reloading"])
        bottom.set_xlabel(f"s ({timed[-1]['policy']})")
        middle.legend()
        bottom.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
