"""`--suite paper`: the three published set-ups, every policy, three kinds of load, and the bars of the project.

Loads: (a) a closed loop of 1, 2, 4 .. 256 clients; (b) Poisson arrivals up to 1.2 times saturation, which
is the best throughput of a static policy in (a); (c) changing load: ramp, bursts, on/off, and a recorded
trace. (d) A closed loop held at the crossover between gamma 0 and speculation, for thrashing
(where the pool holds so many requests).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_nightjar.simulate.acceptance import AcceptanceSpec, Domain, harmonic_tokens, mean_alpha
from sglang_nightjar.simulate.jobs import run_all
from sglang_nightjar.simulate.kept import Kept
from sglang_nightjar.simulate.metrics import Metrics, Slo
from sglang_nightjar.simulate.planners import BASELINES, default_subject, known
from sglang_nightjar.simulate.protocols import Cost
from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.scenario import Scenario, run_scenario
from sglang_nightjar.simulate.setups import find_set_up
from sglang_nightjar.simulate.suite_paper_report import report
from sglang_nightjar.simulate.workload import (
    NAMED_LENGTHS,
    Arrivals,
    Bursts,
    Closed,
    Lognormal,
    Named,
    OnOff,
    Poisson,
    Ramp,
    Trace,
)

# Set-up -> mean acceptance, an assumption: the paper does not give it.
SET_UPS = {"4090-r1-qwen-7b": 0.7, "a100-vicuna-13b": 0.5, "2xl20-qwen-32b": 0.65}
CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOADS = (0.1, 0.25, 0.5, 0.7, 0.85, 1.0, 1.1, 1.2)  # of saturation
LENGTHS = "sharegpt"
_CROSSOVER_S = 120.0


def measure(scenario: Scenario, policy: str, seed: int) -> Metrics:
    """The figures of one run, without its timeline."""
    return run_scenario(scenario, policy, seed).metrics


class Suite:
    """The runs of the suite; `quick` makes them short and few, `keep` is a file of finished ones."""

    def __init__(
        self, policies: Sequence[str], seeds: int, jobs: int, quick: bool, trace: str | None, keep: Path | None = None
    ) -> None:
        self.policies, self.seeds, self.jobs, self.quick = list(policies), seeds, jobs, quick
        self.kept = Kept(keep, Metrics) if keep else None
        self.trace = None if trace is None else str(Path(trace).resolve())
        self.set_ups = ("4090-r1-qwen-7b",) if quick else tuple(SET_UPS)
        self.clients = (1, 16, 256) if quick else CLIENTS
        self.loads = (0.25, 1.0) if quick else LOADS
        self.closed_s, self.open_s, self.dynamic_s = (20.0, 20.0, 40.0) if quick else (60.0, 120.0, 240.0)

    def scenario(self, set_up: str, load: str, arrivals: Arrivals, seconds: float, warmup_s: float) -> Scenario:
        """Acceptance and SLO are the set-up's own."""
        return Scenario(
            name=load,
            set_up=set_up,
            arrivals=arrivals,
            lengths=Named(LENGTHS),
            acceptance=AcceptanceSpec(domains=(Domain(SET_UPS[set_up]),)),
            slo=slo_of(StepCost(find_set_up(set_up))),
            duration_s=seconds,
            warmup_s=warmup_s,
        )

    def run(self, scenarios: Sequence[Scenario], title: str) -> list[dict[str, Any]]:
        """Every policy and seed in every scenario."""
        tasks = [(s, policy, seed) for s in scenarios for policy in self.policies for seed in range(self.seeds)]
        results = run_all(measure, tasks, self.jobs, title, self.kept)
        return [
            {"set_up": scenario.set_up, "load": scenario.name, "policy": policy, "seed": seed, "metrics": metrics}
            for (scenario, policy, seed), metrics in zip(tasks, results, strict=True)
        ]

    def closed(self) -> list[dict[str, Any]]:
        """(a)"""
        made = [
            self.scenario(set_up, str(clients), Closed(clients), self.closed_s, self.closed_s / 6)
            for set_up in self.set_ups
            for clients in self.clients
        ]
        return self.run(made, "(a) closed loop")

    def saturation(self, closed: list[dict[str, Any]], set_up: str) -> float:
        """Requests/s: the best throughput of a static policy over the mean output."""
        best: dict[tuple[str, str], list[float]] = {}
        for row in closed:
            if row["set_up"] == set_up and is_static(row["policy"]):
                best.setdefault((row["load"], row["policy"]), []).append(row["metrics"].throughput)
        lengths = NAMED_LENGTHS[LENGTHS]
        assert isinstance(lengths, Lognormal)
        return max(float(np.mean(values)) for values in best.values()) / _clipped_mean(lengths)

    def poisson(self, rates: dict[str, float]) -> list[dict[str, Any]]:
        """(b); `rates`: saturation of each set-up, requests/s."""
        made = [
            self.scenario(set_up, f"{load:g}", Poisson(load * rates[set_up]), self.open_s, self.open_s / 6)
            for set_up in self.set_ups
            for load in self.loads
        ]
        return self.run(made, "(b) Poisson")

    def dynamic(self, rates: dict[str, float]) -> list[dict[str, Any]]:
        """(c)"""
        made = []
        for set_up in self.set_ups:
            loads = changing_loads(rates[set_up], self.trace)
            made += [self.scenario(set_up, name, load, self.dynamic_s, 0.0) for name, load in loads.items()]
        return self.run(made, "(c) changing load")

    def crossover(self) -> list[dict[str, Any]]:
        """(d)"""
        made = []
        for set_up in self.set_ups:
            clients = crossover(set_up)
            if clients is None:
                continue
            seconds = self.closed_s if self.quick else _CROSSOVER_S
            made.append(self.scenario(set_up, f"crossover {clients}", Closed(clients), seconds, 0.0))
        return self.run(made, "(d) crossover")


def slo_of(cost: Cost) -> Slo:
    """2 s to the first token, and twice the plain step for one request per further token."""
    return Slo(ttft_s=2.0, tpot_s=2.0 * cost.step_s(1, 0, 500.0))


def changing_loads(rate: float, trace: str | None) -> dict[str, Arrivals]:
    """Those of (c) by name; `rate`: saturation, requests/s. `trace`: a file; without one, a synthetic load."""
    loads: dict[str, Arrivals] = {
        "ramp": Ramp(0.1 * rate, 1.2 * rate),
        "bursts": Bursts(0.3 * rate, 1.5 * rate, every_s=40.0, burst_s=10.0),
        "onoff": OnOff(0.95 * rate, on_s=30.0, off_s=30.0, off_rate=0.05 * rate),
    }
    if trace is None:
        loads["synthetic"] = OnOff(1.1 * rate, on_s=12.0, off_s=8.0, off_rate=0.2 * rate)
    else:
        # The trace's requests are longer than ShareGPT's: scaled to the same mean of prompt + output.
        scale = (161.0 + 338.0) / (1155.0 + 211.0)
        loads["trace"] = Trace(trace, rate=0.8 * rate, length_scale=scale)
    return loads


def is_static(policy: str) -> bool:
    """Fixed gamma with the draft resident."""
    return policy == "off" or policy.startswith("static:")


def crossover(set_up: str, context: int = 500) -> int | None:
    """The batch size at which the best gamma > 0 and gamma 0 cost the same per token, within 3 %.

    None where there is none among the batches that fit the pool at `context` tokens per request.
    """
    cost = StepCost(find_set_up(set_up))
    alphas = mean_alpha(AcceptanceSpec(domains=(Domain(SET_UPS[set_up]),)))
    tokens = [harmonic_tokens(alphas, gamma) for gamma in range(cost.max_gamma + 1)]

    def distance(batch: int) -> float:
        plain, *others = (cost.step_s(batch, g, float(batch * context)) / tokens[g] for g in range(len(tokens)))
        return abs(min(others) / plain - 1.0)

    found = min(range(1, min(256, cost.slots(True) // context) + 1), key=distance)
    return found if distance(found) <= 0.03 else None


def _clipped_mean(lengths: Lognormal) -> float:
    """Mean output of the distribution as drawn, cut at `most`."""
    from sglang_nightjar.simulate.workload import draw_lengths

    return float(draw_lengths(lengths, 100_000, np.random.default_rng(0))[1].mean())


def all_policies() -> list[str]:
    """Every policy the suite compares."""
    static = [f"static:{gamma}" for gamma in range(1, 6)]
    return ["off", "no-draft", *static, *known(BASELINES), "oracle", *known(("paper", "nightjar"))]


def run_suite(
    policies: Sequence[str] | None,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    quick: bool = False,
    trace: str | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Runs it, prints tables and bars, and returns every figure."""
    chosen = list(policies or all_policies())
    if not any(is_static(policy) for policy in chosen):
        chosen.insert(0, "off")
    subject = "nightjar" if "nightjar" in chosen else "paper" if "paper" in chosen else default_subject(chosen)
    suite = Suite(chosen, seeds or (1 if quick else 5), jobs, quick, trace, keep)
    closed = suite.closed()
    rates = {set_up: suite.saturation(closed, set_up) for set_up in suite.set_ups}
    parts: dict[str, list[dict[str, Any]]] = {"closed": closed}
    others: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "poisson": lambda: suite.poisson(rates),
        "dynamic": lambda: suite.dynamic(rates),
        "crossover": suite.crossover,
    }
    for name, part in others.items():
        parts[name] = part()
    found = report(parts, chosen, subject, rates)
    return {"level": "L1", "subject": subject, "saturation_requests_s": rates, "bars": found, **parts}
