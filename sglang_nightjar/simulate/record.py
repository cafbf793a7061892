"""What is written down while a server runs; `metrics` makes figures of it."""

from dataclasses import dataclass, field

import numpy as np

from sglang_nightjar.simulate.elastic import ElasticPool
from sglang_nightjar.simulate.workload import Work

COLD_STEPS = 200  # decode steps after the start whose throughput is kept apart
TIMELINE = ("time_s", "batch", "gamma", "queue", "free_share", "residency", "tokens")


@dataclass
class Record:
    """One run.

    Attributes:
        work: the requests; a closed loop's `arrival_s` are filled in as they are sent.
        first_s, finish_s: time of the first and the last token, s, [requests]; NaN before.
        window_tokens, window_s: tokens committed from `warmup_s` until requests stopped coming, and that time.
        gammas: decode steps of each gamma while requests came, [max_gamma + 1]. switches: changes of gamma
            between them. starts: changes from 0 to a positive gamma. decode_s: seconds of these steps.
        cold_tokens, cold_s: of the first `COLD_STEPS` decode steps.
        timeline: one row of `TIMELINE` per `sample_s`; tokens are those since the row before.
    """

    work: Work
    max_gamma: int
    warmup_s: float
    stop_s: float
    sample_s: float = 1.0
    first_s: np.ndarray[tuple[int], np.dtype[np.float64]] = field(init=False)
    finish_s: np.ndarray[tuple[int], np.dtype[np.float64]] = field(init=False)
    gammas: list[int] = field(init=False)
    timeline: list[tuple[float, ...]] = field(default_factory=list)
    window_tokens: int = 0
    window_s: float = 0.0
    all_tokens: int = 0
    end_s: float = 0.0
    steps: int = 0
    prefill_steps: int = 0
    decode_s: float = 0.0
    cold_tokens: int = 0
    cold_s: float = 0.0
    switches: int = 0
    starts: int = 0
    catchup_tokens: int = 0
    catchup_s: float = 0.0
    preemptions: int = 0
    rejected: int = 0
    evictions: int = 0
    reloads: int = 0
    postponed: int = 0

    def __post_init__(self) -> None:
        count = len(self.work.prompt)
        self.first_s, self.finish_s = np.full(count, np.nan), np.full(count, np.nan)
        self.gammas = [0] * (self.max_gamma + 1)
        self._gamma = 0
        self._next_sample_s = 0.0
        self._sample_tokens = 0
        self._open = True  # requests still come
        if self.work.concurrency is None:
            last = float(self.work.arrival_s[-1]) if count else 0.0
            self.stop_s = min(self.stop_s, last)

    def add_tokens(self, tokens: int, now_s: float) -> None:
        """`tokens` were committed at `now_s`."""
        self.all_tokens += tokens
        self._sample_tokens += tokens
        if self._open:
            if now_s > self.stop_s:
                self.stop(now_s)
            if now_s > self.warmup_s:
                self.window_tokens += tokens
                self.window_s = now_s - self.warmup_s

    def stop(self, now_s: float) -> None:
        """No more requests come: the window closes, also for latencies."""
        if self._open:
            self._open = False
            self.stop_s = min(self.stop_s, now_s)

    def step(
        self,
        now_s: float,
        seconds: float,
        batch: int,
        gamma: int,
        tokens: int,
        queue: int,
        pool: ElasticPool,
        used: int,
    ) -> None:
        """A decode step ended at `now_s`."""
        self.steps += 1
        if self.steps <= COLD_STEPS:
            self.cold_tokens += tokens
            self.cold_s += seconds
        if self._open:
            self.decode_s += seconds
            self.gammas[gamma] += 1
            if gamma != self._gamma:
                self.switches += 1
                self.starts += self._gamma == 0
        self._gamma = gamma
        self.add_tokens(tokens, now_s)
        if now_s >= self._next_sample_s:
            free = 1.0 - used / pool.total
            self.timeline.append((now_s, batch, gamma, queue, free, int(pool.residency), self._sample_tokens))
            self._sample_tokens = 0
            self._next_sample_s = now_s + self.sample_s

    def finish(self, now_s: float, pool: ElasticPool) -> None:
        """The run is over."""
        self.stop(now_s)
        self.end_s = now_s
        self.evictions, self.reloads, self.postponed = pool.evictions, pool.reloads, pool.postponed
