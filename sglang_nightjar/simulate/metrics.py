"""Figures of one run."""

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_nightjar.simulate.fields import Positive
from sglang_nightjar.simulate.record import TIMELINE, Record


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request must meet to count as good: time to its first token, and seconds per further token."""

    ttft_s: Positive = 2.0
    tpot_s: Positive = 0.1


class Spread(msgspec.Struct, frozen=True):
    """Mean, median and 99th percentile, s."""

    mean: float
    p50: float
    p99: float


class Metrics(msgspec.Struct, frozen=True):
    """Attributes:

    throughput: tokens/s committed while requests came (after the warm-up). makespan_throughput: over the whole run.
    e2e, ttft, tpot: of requests that arrived in that window; arrival to last token, arrival to first token,
        and time per output token after the first (requests of two or more tokens).
    goodput: requests/s of them that met the SLO. attainment: their share. rate: requests/s that arrived.
    gammas: share of decode steps of each gamma. switches_s: changes of gamma per second of decoding.
    cold_throughput: tokens/s of the first 200 decode steps, their own seconds only.
    """

    throughput: float
    makespan_throughput: float
    e2e: Spread
    ttft: Spread
    tpot: Spread
    goodput: float
    attainment: float
    rate: float
    requests: int
    tokens: int
    seconds: float
    steps: int
    prefill_steps: int
    gammas: tuple[float, ...]
    mean_gamma: float
    switches_s: float
    cold_throughput: float
    starts: int
    catchup_tokens: int
    catchup_s: float
    preemptions: int
    rejected: int
    evictions: int
    reloads: int
    postponed: int


def _spread(values: npt.NDArray[np.float64]) -> Spread:
    if not len(values):
        return Spread(float("nan"), float("nan"), float("nan"))
    return Spread(float(values.mean()), float(np.percentile(values, 50)), float(np.percentile(values, 99)))


def summarize(record: Record, slo: Slo) -> Metrics:
    """The figures of a finished run."""
    arrival, output = record.work.arrival_s, record.work.output
    chosen = np.isfinite(record.finish_s) & (arrival >= record.warmup_s) & (arrival <= record.stop_s)
    e2e = record.finish_s[chosen] - arrival[chosen]
    ttft = record.first_s[chosen] - arrival[chosen]
    tpot = (record.finish_s[chosen] - record.first_s[chosen]) / np.maximum(output[chosen] - 1, 1)
    good = int(np.count_nonzero((ttft <= slo.ttft_s) & (tpot <= slo.tpot_s)))
    window = max(record.stop_s - record.warmup_s, 1e-9)
    steps = max(sum(record.gammas), 1)
    return Metrics(
        throughput=record.window_tokens / record.window_s if record.window_s else 0.0,
        makespan_throughput=record.all_tokens / record.end_s if record.end_s else 0.0,
        e2e=_spread(e2e),
        ttft=_spread(ttft),
        tpot=_spread(tpot[output[chosen] > 1]),
        goodput=good / window,
        attainment=good / len(e2e) if len(e2e) else float("nan"),
        rate=len(e2e) / window,
        requests=int(np.isfinite(record.finish_s).sum()),
        tokens=record.all_tokens,
        seconds=record.end_s,
        steps=record.steps,
        prefill_steps=record.prefill_steps,
        gammas=tuple(count / steps for count in record.gammas),
        mean_gamma=sum(gamma * count for gamma, count in enumerate(record.gammas)) / steps,
        switches_s=record.switches / record.decode_s if record.decode_s else 0.0,
        cold_throughput=record.cold_tokens / record.cold_s if record.cold_s else 0.0,
        starts=record.starts,
        catchup_tokens=record.catchup_tokens,
        catchup_s=record.catchup_s,
        preemptions=record.preemptions,
        rejected=record.rejected,
        evictions=record.evictions,
        reloads=record.reloads,
        postponed=record.postponed,
    )


def timeline(record: Record) -> dict[str, list[float]]:
    """The samples of a run by column, see `record.TIMELINE`."""
    return {name: [row[index] for row in record.timeline] for index, name in enumerate(TIMELINE)}
