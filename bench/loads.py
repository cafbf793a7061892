"""What the name of a load means: how long requests are, and when they are sent.

    cN      N clients that each send their next request when the last one is answered
    rR      R requests/s (Poisson)
    xS      the same, at S times `rate`
    ramp, bursts, onoff     changing rates, and
    trace   a recording's arrivals and lengths, by the rules of `simulate/suite_paper.py: changing_loads`

Times are the device's: emulated seconds where it is emulated. The same name and rules give the same requests each
time, to every policy, and to the simulator.
"""

from dataclasses import dataclass, replace

import numpy as np

from sglang_nightjar.simulate.suite_paper import LENGTHS, changing_loads
from sglang_nightjar.simulate.workload import (
    Arrivals,
    Closed,
    Fixed,
    Lengths,
    Lognormal,
    Named,
    Poisson,
    Work,
    draw_work,
)

# Requests/s that the best static policy serves of ShareGPT's lengths, by the simulator (docs/results.md).
SATURATION = {"4090-r1-qwen-7b": 14.05, "a100-vicuna-13b": 4.147, "2xl20-qwen-32b": 3.720}
_NO_LIMIT = 100_000  # requests of an open loop: its duration is the limit


@dataclass(frozen=True)
class Rules:
    """Attributes:

    rate: requests/s that `xS` and the changing loads multiply: what the set-up can serve at most.
    duration_s: for which an open loop sends.
    lengths: of requests, but for the trace's, which has its own.
    requests: of a closed loop, at the least; always so many that its ends, where the batch fills and empties, do
        not weigh more than its middle.
    trace: a file (`simulate/traces.py`).
    """

    rate: float
    duration_s: float
    lengths: Lengths = Named(LENGTHS)
    requests: int = 0
    trace: str | None = None


def draw(load: str, rules: Rules, seed: int = 0) -> Work:
    """The requests; a closed loop's arrivals are filled in by whoever serves them, so each call makes its own."""
    arrivals: Arrivals
    if load[0] == "c" and load[1:].isdigit():
        arrivals = Closed(int(load[1:]))
        count = max(rules.requests, round(6 * arrivals.concurrency**0.75))
        return draw_work(arrivals, rules.lengths, rules.duration_s, count, seed)
    if load[0] in "rx" and load[1:].replace(".", "", 1).isdigit():
        arrivals = Poisson(float(load[1:]) * (rules.rate if load[0] == "x" else 1.0))
    else:
        known = changing_loads(rules.rate, rules.trace)
        if load not in known:
            missing = "; the load `trace` needs --trace FILE" if load == "trace" else ""
            raise SystemExit(f"the load {load!r} is none of cN, rR, xS, {', '.join(known)}{missing}")
        arrivals = known[load]
    work = draw_work(arrivals, rules.lengths, rules.duration_s, _NO_LIMIT, seed)
    if not len(work.prompt):
        raise SystemExit(f"the load {load!r} has no request within {rules.duration_s} s")
    return work


def read_lengths(text: str) -> Lengths:
    """A name of `simulate/workload.py: NAMED_LENGTHS`; PROMPT:OUTPUT for requests that are all alike; or
    PROMPT:OUTPUT:SIGMA for log-normal lengths of these means, SIGMA the standard deviation of the logarithm."""
    if ":" not in text:
        return Named(text)
    prompt, output, *sigma = text.split(":")
    if not sigma:
        return Fixed(int(prompt), int(output))
    return Lognormal(float(prompt), float(output), float(sigma[0]), float(sigma[0]))


def at_least(work: Work, prompt: int) -> Work:
    """`work` with prompts of at least so many tokens: a chat template has some of its own."""
    return replace(work, prompt=np.maximum(work.prompt, prompt))
