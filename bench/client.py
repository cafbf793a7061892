"""`sglang.bench_serving` in a process of its own, on requests of ours.

Its client, its measurements, its arithmetic. What it cannot do is given to it from outside: arrivals other than of one
constant rate (its generator of requests is replaced in that process), when each request was sent (it is noted when the
metrics are made), and an emulated device's seconds (its results are converted).
"""

import asyncio
import contextlib
import inspect
import json
import multiprocessing
import runpy
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from serving import Server
from window import window

from sglang_nightjar.simulate.metrics import Slo
from sglang_nightjar.simulate.workload import Work

_GENERATOR = ("input_requests", "request_rate")  # arguments of what we replace, as far as we use them
_METRICS = ("input_requests", "outputs")


class Run:
    """One call of it, begun with the object and awaited by `result`.

    Args:
        requests: file of chat requests, one JSON object with `messages` and `max_tokens` a line.
        work: those requests' arrivals, or how many clients send them one after the other. In emulated seconds.
        speed: emulated seconds per second.
        slo: of a request to count for goodput.
        may_end: at the model's end token; SGLang then admits more requests than there may be room for.
        folder, name: where its files are kept, and how they are called.
    """

    def __init__(
        self,
        server: Server,
        requests: Path,
        work: Work,
        *,
        speed: float,
        slo: Slo,
        folder: Path,
        name: str,
        may_end: bool = False,
    ) -> None:
        self._server, self._count, self._speed, self._clients = server, len(work.prompt), speed, work.concurrency
        self._output, self._log, self._times = (folder / f"{name}.{end}" for end in ("jsonl", "log", "times"))
        self._output.unlink(missing_ok=True)
        limits = [f"ttft:{slo.ttft_s * 1e3 / speed}", f"tpot:{slo.tpot_s * 1e3 / speed}"]
        words: list[Any] = ["bench_serving", "--backend", "sglang-oai-chat", "--host", "127.0.0.1"]
        words += ["--port", server.url.rsplit(":", 1)[1], "--tokenizer", server.get("/model_info")["tokenizer_path"]]
        words += ["--dataset-name", "openai", "--dataset-path", requests, "--num-prompts", self._count]
        words += ["--output-file", self._output, "--output-details", "--disable-tqdm", "--warmup-requests", 0]
        words += ["--flush-cache", "--goodput", *limits]
        if may_end:
            words.append("--disable-ignore-eos")
        if work.concurrency is not None:
            words += ["--max-concurrency", work.concurrency]
        arrivals = None if work.concurrency is not None else [at_s / speed for at_s in work.arrival_s.tolist()]
        # A fork of this process, which has imported it all: each start would cost more than many a load.
        self._child = multiprocessing.get_context("fork").Process(
            target=_run, args=([str(word) for word in words], self._log, self._times, arrivals)
        )
        self._child.start()

    def result(self) -> dict[str, Any]:
        """Waits; its JSON in emulated ms, s and 1/s, and of ours:

        answers: a checksum of each request's text, in order.
        throughput, window_s: tokens/s while requests came, and how long that was (`window.py`).
        goodput: requests/s of that time that met `slo`.

        Ends the benchmark where a request was not answered whole.
        """
        self._child.join()
        if self._child.exitcode != 0 or not self._output.exists():
            raise SystemExit(f"bench_serving failed:\n{self._log.read_text()[-3000:]}")
        found: dict[str, Any] = json.loads(self._output.read_text().splitlines()[-1])
        if found["completed"] != self._count:
            raise SystemExit(f"{found['completed']} of {self._count} requests were answered; see {self._server.log}")
        result = converted(found, self._speed)
        result["answers"] = [zlib.crc32(text.encode()) for text in found["generated_texts"]]
        sent, chunks, tokens = zip(*json.loads(self._times.read_text()), strict=True)
        rate, seconds = window(np.array(sent), [np.array(times) for times in chunks], np.array(tokens), self._clients)
        result["throughput"], result["window_s"] = rate / self._speed, seconds * self._speed
        result["goodput"] = result["slo_attainment"] * self._count / result["window_s"]
        return result


def converted(found: dict[str, Any], speed: float) -> dict[str, Any]:
    """`bench_serving`'s figures, of wall time, in emulated time."""
    result = {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.endswith("_ms") or name == "duration":
            result[name] = value * speed
        elif name.endswith("_throughput") or name == "request_goodput":
            result[name] = value / speed
        elif name in ("completed", "total_input_tokens", "total_output_tokens", "slo_attainment"):
            result[name] = value
    return result


def _run(command: list[str], log: Path, times: Path, arrivals_s: list[float] | None) -> None:
    """`python -m sglang.bench_serving` in this process."""
    sys.argv = command
    with log.open("w") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        _note_times(times)
        if arrivals_s is not None:
            _replace_arrivals(arrivals_s)
        runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)


def _check(function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    names = tuple(inspect.signature(function).parameters)
    assert names[: len(expected)] == expected, f"{function.__qualname__} of sglang.benchmark.serving takes {names}"


def _note_times(path: Path) -> None:
    """Writes, of each request, when it was sent, when the parts of its answer came, and its tokens."""
    from sglang.benchmark import serving

    original = serving.calculate_metrics
    _check(original, _METRICS)

    def calculate_metrics(*, outputs: Sequence[Any], **others: Any) -> Any:
        rows = []
        for each in outputs:
            first = each.start_time + each.ttft
            rows.append((each.start_time, [first, *(first + np.cumsum(each.itl)).tolist()], each.output_len))
        path.write_text(json.dumps(rows))
        return original(outputs=outputs, **others)

    serving.calculate_metrics = calculate_metrics


def _replace_arrivals(arrivals_s: list[float]) -> None:
    from sglang.benchmark import serving

    _check(serving.get_request, _GENERATOR)

    async def get_request(input_requests: Sequence[Any], request_rate: float, *_: Any) -> AsyncIterator[Any]:
        began = time.perf_counter()
        for request, at_s in zip(input_requests, arrivals_s, strict=True):
            await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
            yield request

    serving.get_request = get_request
