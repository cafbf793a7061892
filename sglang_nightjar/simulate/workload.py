"""When requests arrive and how long they are."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.fields import Count, NotNegative, Positive

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_STEPS = 20_000  # points of the grid on which a changing rate is integrated


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fixed", tag_field="kind"):
    """Every request alike."""

    prompt: Count
    output: Count


class Lognormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="lognormal", tag_field="kind"):
    """Lengths with the given means; sigma is the standard deviation of the logarithm; clipped to 1 .. `most`."""

    prompt_mean: Positive
    output_mean: Positive
    prompt_sigma: NotNegative = 1.0
    output_sigma: NotNegative = 0.8
    most: Count = 4096


class Empirical(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="empirical", tag_field="kind"):
    """Pairs (prompt, output), drawn with replacement."""

    pairs: tuple[tuple[Count, Count], ...]


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="named", tag_field="kind"):
    """A known data set's lengths, by name: see `NAMED_LENGTHS`."""

    name: str


Lengths = Fixed | Lognormal | Empirical | Named

# Means: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention" (SOSP 2023),
# section 6.1; the sigmas are read off the spread of its histograms. SpecBench: the 480 questions
# (mean words times 1.3), the answers' mean as usual in its reports.
NAMED_LENGTHS = {
    "sharegpt": Lognormal(161.0, 338.0, 1.2, 0.9, 2048),
    "alpaca": Lognormal(19.3, 58.5, 0.6, 0.9, 1024),
    "specbench": Lognormal(350.0, 220.0, 1.0, 0.7, 2048),
    # The Azure conversation trace of 2023 (means of its 19,366 requests).
    "azure-conv": Lognormal(1155.0, 211.0, 1.0, 0.7, 4096),
}


def draw_lengths(spec: Lengths, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Prompt and output tokens of `count` requests, [count] each."""
    if isinstance(spec, Named):
        found = NAMED_LENGTHS.get(spec.name)
        if found is None:
            raise UserError(f"field lengths.name: {spec.name!r} is not one of {', '.join(NAMED_LENGTHS)}")
        spec = found
    if isinstance(spec, Fixed):
        return np.full(count, spec.prompt, np.int64), np.full(count, spec.output, np.int64)
    if isinstance(spec, Empirical):
        if not spec.pairs:
            raise UserError("field lengths.pairs is empty; give at least one [prompt, output]")
        chosen = np.array(spec.pairs, np.int64)[rng.integers(0, len(spec.pairs), count)]
        return chosen[:, 0].copy(), chosen[:, 1].copy()

    # One row per request, so that request i does not depend on how many there are.
    sigma = np.array([spec.prompt_sigma, spec.output_sigma])
    centre = np.log([spec.prompt_mean, spec.output_mean]) - sigma * sigma / 2
    drawn = np.exp(centre + sigma * rng.standard_normal((count, 2)))
    both = np.clip(np.rint(drawn), 1, spec.most).astype(np.int64)
    return both[:, 0].copy(), both[:, 1].copy()


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="closed", tag_field="kind"):
    """`concurrency` clients, each sending its next request when the last one is answered.

    `turnaround_s`: from the step in which an answer ends until the client's next request can be scheduled: both go
    through tokenizer, HTTP and client. At 0 the next request is in time for the very next step, which no server
    over HTTP sees; it waits for one decode step of the others. Latencies are the client's: all of it is in them.
    """

    concurrency: Count
    turnaround_s: NotNegative = 0.0


class Poisson(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="poisson", tag_field="kind"):
    """A constant rate, requests/s."""

    rate: Positive


class Bursts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="bursts", tag_field="kind"):
    """`rate`, and `burst_rate` for `burst_s` seconds at the end of every `every_s`."""

    rate: NotNegative
    burst_rate: Positive
    every_s: Positive
    burst_s: Positive


class Ramp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ramp", tag_field="kind"):
    """From `low` to `high` in the middle of the run and back, requests/s."""

    low: NotNegative
    high: Positive


class OnOff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="onoff", tag_field="kind"):
    """`rate` for `on_s` seconds, then `off_rate` for `off_s`, and again."""

    rate: Positive
    on_s: Positive
    off_s: Positive
    off_rate: NotNegative = 0.0


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="trace", tag_field="kind"):
    """Arrivals and lengths of a file; see `traces.read_trace`.

    `rate` scales time so that the mean rate becomes this (null: as recorded). `length_scale` multiplies
    lengths; longer ones than `most` tokens, prompt and output each, are cut to it.
    """

    file: str
    rate: Positive | None = None
    length_scale: Positive = 1.0
    most: Count = 4096


Arrivals = Closed | Poisson | Bursts | Ramp | OnOff | Trace


@dataclass(frozen=True)
class Work:
    """The requests of a run, in order of arrival.

    Attributes:
        arrival_s: [requests], s; empty meaning when `concurrency` is set (they arrive as others finish).
        prompt, output: tokens, [requests] each.
        concurrency: clients of a closed loop, or None. turnaround_s: as in `Closed`.
    """

    arrival_s: Floats
    prompt: Ints
    output: Ints
    concurrency: int | None = None
    turnaround_s: float = 0.0


def rate_profile(spec: Bursts | Ramp | OnOff | Poisson, times: Floats, duration_s: float) -> Floats:
    """The rate at `times`, requests/s."""
    if isinstance(spec, Poisson):
        return np.full_like(times, spec.rate)
    if isinstance(spec, Bursts):
        return np.where(times % spec.every_s >= spec.every_s - spec.burst_s, spec.burst_rate, spec.rate)
    if isinstance(spec, OnOff):
        return np.where(times % (spec.on_s + spec.off_s) < spec.on_s, spec.rate, spec.off_rate)
    middle = duration_s / 2
    return spec.low + (spec.high - spec.low) * (1 - np.abs(times - middle) / middle)


def draw_work(
    arrivals: Arrivals, lengths: Lengths, duration_s: float, requests: int, seed: int, folder: Path = Path(".")
) -> Work:
    """The requests that arrive within `duration_s` seconds, `requests` at most.

    A trace's file is looked for in `folder`. The same seed gives the same requests.
    """
    rng = np.random.default_rng([seed, 0xA221])
    if isinstance(arrivals, Closed):
        prompt, output = draw_lengths(lengths, requests, rng)
        return Work(np.full(requests, np.nan), prompt, output, arrivals.concurrency, arrivals.turnaround_s)
    if isinstance(arrivals, Trace):
        from sglang_nightjar.simulate.traces import read_trace

        return read_trace(folder / arrivals.file, arrivals, duration_s, requests)
    # A Poisson process of unit rate, its time stretched by the integral of the rate.
    grid = np.linspace(0.0, duration_s, _STEPS + 1)
    rate = rate_profile(arrivals, (grid[:-1] + grid[1:]) / 2, duration_s)
    reached = np.concatenate(([0.0], np.cumsum(rate * np.diff(grid))))
    most = min(requests, int(reached[-1] + 10 * np.sqrt(reached[-1]) + 20))
    # Lengths come from their own generator, so that request i is the same at every rate.
    unit = np.cumsum(rng.exponential(size=most))
    times = np.interp(unit[unit < reached[-1]], reached, grid)
    prompt, output = draw_lengths(lengths, most, np.random.default_rng([seed, 0x1E46]))
    return Work(times, prompt[: len(times)], output[: len(times)])
