"""What the portable CPU platform does on this machine: linears by themselves, then real servers.

    scripts/python bench/platform.py --json platform.json

Part 1 times the linears of the demo model, plain against prepacked. Part 2 serves the
demo model without speculation (`off`) and the demo pair with gamma 1, 3 and 5, all at once (an
idle server sleeps), and loads one after the other at each concurrency. `--arms off,away` compares a
server that has evicted its draft, so that gamma is 0, with one that never had a draft. Every arm is measured in every
repeat, so that drift of the machine hits all alike; figures are medians over the repeats.
Compare them within one run only.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# In place of this script's folder, where this file would shadow the standard library's `platform`.
sys.path[0] = str(ROOT / "tests")
sys.path.append(str(ROOT / "bench"))
import away  # noqa: E402
from evidence.parts import linears, servers  # noqa: E402
from machine import machine  # noqa: E402
from serving import Server, serve_all  # noqa: E402

ARMS = "off,1,3,5"
CONCURRENCIES = (1, 8, 32)
POOL = ("--max-total-tokens", 6144)  # enough for 32 requests; four servers share the memory
ARM_WORDS: dict[str, tuple[str, ...]] = {
    "off": ("--nightjar-policy", "off"),
    "away": away.WORDS,
}
ROWS = (1, 2, 4, 8, 16, 32, 64)
# Outputs x inputs of one layer of SmolLM2-135M (30 of them), and of its head.
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 30
HEAD_SHAPE = (49152, 576)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens generated per request")
    parser.add_argument("--parts", default="linear,servers", help="linear, servers, or both")
    parser.add_argument("--arms", default=ARMS, help="servers: off, away or a gamma; compared to the first")
    parser.add_argument("--concurrencies", type=numbers, default=CONCURRENCIES, help="requests in flight")
    options = parser.parse_args()

    result: dict[str, Any] = {"machine": machine()}
    if "linear" in options.parts:
        result["linear"] = bench_linears(options.repeats)
    if "servers" in options.parts:
        result["servers"] = bench_servers(options)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(report(result))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def bench_linears(repeats: int) -> list[dict[str, float]]:
    """Milliseconds for every matmul of one forward of the demo model, by rows and method."""
    from sglang_nightjar.config import NightjarConfig
    from sglang_nightjar.platform.threads import set_thread_environment

    set_thread_environment(NightjarConfig(), ranks=1)  # as in a server; before torch reads it
    import torch

    from sglang_nightjar.kernels.int8_linear import int8_linear, quantize_weight
    from sglang_nightjar.kernels.packed_linear import PackedLinear

    weights = [torch.randn(shape) for _ in range(LAYERS) for shape in LAYER_SHAPES] + [torch.randn(HEAD_SHAPE)]
    packed = [PackedLinear(weight) for weight in weights]
    quantized = [quantize_weight(weight, 8) for weight in weights]
    linear = torch.nn.functional.linear

    def run(inputs: list[Any], calls: Callable[[int, Any], Any]) -> float:
        begin = time.perf_counter()
        for index, x in enumerate(inputs):
            calls(index, x)
        return (time.perf_counter() - begin) * 1e3

    methods: dict[str, Callable[[int, Any], Any]] = {
        "plain_ms": lambda index, x: linear(x, weights[index]),
        "packed_ms": lambda index, x: packed[index](x),
        "int8_ms": lambda index, x: int8_linear(x, quantized[index].q, quantized[index].scale),
    }
    table = []
    for rows in ROWS:
        inputs = [torch.randn(rows, weight.shape[1]) for weight in weights]
        times: dict[str, list[float]] = {name: [] for name in methods}
        for repeat in range(repeats * 4 + 1):
            for name, calls in methods.items():
                elapsed = run(inputs, calls)
                if repeat > 0:  # the first round warms up
                    times[name].append(elapsed)
        row = {name: statistics.median(values) for name, values in times.items()}
        table.append({"rows": rows, **row, "packed_speedup": row["plain_ms"] / row["packed_ms"]})
        progress(f"linears at {rows} rows: {row}")
    return table


def bench_servers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Output tokens per second of the demo pair, by gamma and concurrency."""
    prompts = [f"<|im_start|>user\n{line}<|im_end|>\n<|im_start|>assistant\n" for line in prompt_lines()]
    names = options.arms.split(",")
    command_lines = [(*ARM_WORDS.get(name, ("--nightjar-policy", f"static:{name}")), *POOL) for name in names]
    progress("starting the servers")
    with serve_all(command_lines) as servers:
        arms = dict(zip(names, servers, strict=True))
        for name, server in arms.items():
            load(server, prompts[:8], 8, 8)
            if name == "away":
                away.send_away(server)
        samples: dict[tuple[int, str], list[dict[str, float]]] = {}
        for repeat in range(options.repeats):
            for concurrency in options.concurrencies:
                count = max(8, 2 * concurrency)
                chosen = [prompts[(repeat * 7 + index) % len(prompts)] for index in range(count)]
                for name, server in arms.items():
                    sample = load(server, chosen, concurrency, options.max_tokens)
                    samples.setdefault((concurrency, name), []).append(sample)
                    progress(f"repeat {repeat + 1}, concurrency {concurrency}, gamma {name}: {sample}")
        if "away" in arms:
            away.require_away(arms["away"])
    table = []
    for (concurrency, name), taken in samples.items():
        plain = [sample["tokens_per_s"] for sample in samples[concurrency, names[0]]]
        own = [sample["tokens_per_s"] for sample in taken]
        table.append(
            {
                "concurrency": concurrency,
                "gamma": name,
                "tokens_per_s": statistics.median(own),
                "accept_length": statistics.median(sample["accept_length"] for sample in taken),
                "speedup": statistics.median(a / b for a, b in zip(own, plain, strict=True)),
            }
        )
    return table


def load(server: Server, prompts: list[str], concurrency: int, max_tokens: int) -> dict[str, float]:
    """Sends `prompts` with `concurrency` in flight, on an empty radix cache."""
    server.flush_cache()

    def one(prompt: str) -> dict[str, Any]:
        answer: dict[str, Any] = server.generate(prompt, max_new_tokens=max_tokens)
        return answer["meta_info"]

    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(one, prompts))
    elapsed = time.perf_counter() - begin
    tokens = sum(answer["completion_tokens"] for answer in answers)
    verifies = sum(answer.get("spec_verify_ct", 0) for answer in answers)
    drafted = sum(answer["completion_tokens"] - 1 for answer in answers)  # the first token comes from the prefill
    return {"tokens_per_s": tokens / elapsed, "accept_length": drafted / verifies if verifies else 1.0}


def prompt_lines() -> list[str]:
    return (Path(__file__).parent / "prompts.txt").read_text().splitlines()


def report(result: dict[str, Any]) -> str:
    """The figures as Markdown tables."""
    about = result["machine"]
    found = [f"{about['cpu']}, {about['cores']} cores, {about['date']}, commit {about['commit']}"]
    if "linear" in result:
        found.append(linears(result))
    if "servers" in result:
        found.append(servers(result))
    return "\n\n".join(found)


def progress(message: str) -> None:
    print(f"[bench] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
