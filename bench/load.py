"""Sends the simulator's `Work` to a real server, over HTTP: the same requests, at the same times, token for token.

What comes back is a `Record` like the simulator's, so that `simulate.metrics.summarize` gives the figures of both
levels by one definition. Times are emulated seconds: the server's speed times ours.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from sglang_nightjar.emulate.vocabulary import FIRST, ORDINARY
from sglang_nightjar.simulate.record import Record
from sglang_nightjar.simulate.workload import Work

_PATIENCE_S = 3600.0


@dataclass(slots=True)
class Answer:
    """One request's. Times in s since the load began, on this machine's clock."""

    sent_s: float = float("nan")
    chunks_s: list[float] = field(default_factory=list)  # when its parts came
    tokens: int = 0
    text: str = ""


def send(url: str, work: Work, *, speed: float, seed: int = 0) -> tuple[Record, list[Answer]]:
    """Sends all of `work` and waits for the answers.

    Args:
        url: of the server; its tokens are the emulator's.
        work: lengths and arrivals in emulated seconds, or a closed loop's concurrency.
        speed: emulated seconds per second.
        seed: of the prompts' tokens.
    Returns:
        A record in emulated seconds (arrivals, first and last tokens, makespan), and the answers.
    Raises:
        RuntimeError: a request was not answered with as many tokens as it was to have.
    """
    answers = asyncio.run(_Client(url, work, speed, seed).run())
    short = [index for index, answer in enumerate(answers) if answer.tokens != int(work.output[index])]
    if short:
        raise RuntimeError(f"{len(short)} of {len(answers)} requests were cut short, the first is number {short[0]}")
    began = min(answer.sent_s for answer in answers)
    sent, first, last = (
        (np.array(times) - began) * speed
        for times in zip(*((each.sent_s, each.chunks_s[0], each.chunks_s[-1]) for each in answers), strict=True)
    )
    record = Record(Work(sent, work.prompt, work.output, work.concurrency), 0, 0.0, float("inf"))
    record.first_s, record.finish_s = first, last
    record.all_tokens, record.end_s = int(work.output.sum()), float(last.max())
    return record, answers


class _Client:
    def __init__(self, url: str, work: Work, speed: float, seed: int) -> None:
        self._url, self._work, self._speed, self._seed = url + "/generate", work, speed, seed
        self._answers = [Answer() for _ in work.prompt]
        self._began = 0.0

    async def run(self) -> list[Answer]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._began = time.perf_counter()
            if self._work.concurrency is None:
                await asyncio.gather(*(self._at(session, index) for index in range(len(self._answers))))
            else:
                waiting = iter(range(len(self._answers)))
                clients = min(self._work.concurrency, len(self._answers))
                await asyncio.gather(*(self._one_after_another(session, waiting) for _ in range(clients)))
        return self._answers

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _at(self, session: aiohttp.ClientSession, index: int) -> None:
        await asyncio.sleep(max(0.0, float(self._work.arrival_s[index]) / self._speed - self._now()))
        await self._send(session, index)

    async def _one_after_another(self, session: aiohttp.ClientSession, waiting: Iterator[int]) -> None:
        for index in waiting:
            await self._send(session, index)

    async def _send(self, session: aiohttp.ClientSession, index: int) -> None:
        body = {
            "input_ids": prompt(index, int(self._work.prompt[index]), self._seed),
            "sampling_params": {"temperature": 0, "max_new_tokens": int(self._work.output[index]), "ignore_eos": True},
            "stream": True,
        }
        answer = self._answers[index]
        answer.sent_s = self._now()
        last = b""
        async with session.post(self._url, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    answer.chunks_s.append(self._now())
                    last = line
        content = json.loads(last.removeprefix(b"data: "))
        answer.tokens, answer.text = content["meta_info"]["completion_tokens"], content["text"]


def prompt(index: int, length: int, seed: int) -> list[int]:
    """Token ids of a request; no two requests begin alike."""
    rng = np.random.default_rng([seed, index])
    ids: list[int] = (FIRST + rng.integers(0, ORDINARY, length)).tolist()
    return ids
