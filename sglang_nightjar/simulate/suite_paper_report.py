"""Tables and bars of `suite_paper`: means over seeds, and the subject against the others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_nightjar.simulate.planners import BASELINES
from sglang_nightjar.simulate.table import bars, met, table

# What the paper reports for its planner's throughput, in percent over each, mean of its set-ups and data.
PAPER = {
    "off": 27.29,
    "static:3": 8.32,
    "dsd": 22.89,
    "banditspec-ucb": 19.76,
    "banditspec-exp3": 19.76,
    "tetris": 7.39,
}
# Of a table of one load: column -> figure.
OPEN_COLUMNS = {
    "e2e s": "e2e.mean",
    "p99": "e2e.p99",
    "ttft s": "ttft.mean",
    "ttft p99": "ttft.p99",
    "tpot s": "tpot.mean",
    "tpot p99": "tpot.p99",
    "goodput/s": "goodput",
    "tok/s": "throughput",
    "switch/s": "switches_s",
    "evict": "evictions",
    "preempt": "preemptions",
}


class Means:
    """Means over seeds by (set-up, load, policy)."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._cells: dict[tuple[str, str, str], list[Any]] = {}
        for row in rows:
            self._cells.setdefault((row["set_up"], row["load"], row["policy"]), []).append(row["metrics"])
        self.set_ups = list(dict.fromkeys(key[0] for key in self._cells))

    def loads(self, set_up: str) -> list[str]:
        """The loads run on `set_up`."""
        return list(dict.fromkeys(key[1] for key in self._cells if key[0] == set_up))

    def __call__(self, set_up: str, load: str, policy: str, figure: str) -> float:
        """Mean of `figure` (dotted, such as `e2e.p99`) over the seeds; NaN where it was not run."""
        values = []
        for metrics in self._cells.get((set_up, load, policy), []):
            value = metrics
            for part in figure.split("."):
                value = getattr(value, part)
            values.append(float(value))
        return float(np.mean(values)) if values else float("nan")


def report(
    parts: dict[str, list[dict[str, Any]]], policies: Sequence[str], subject: str, rates: dict[str, float]
) -> list[dict[str, object]]:
    """Prints everything; returns the bars."""
    static = [policy for policy in policies if policy == "off" or policy.startswith("static:")]
    baselines = [policy for policy in policies if policy.partition(":")[0] in BASELINES]
    closed, poisson, dynamic, crossover = (Means(parts[name]) for name in ("closed", "poisson", "dynamic", "crossover"))
    found: list[dict[str, object]] = []
    for set_up in closed.set_ups:
        print(f"\n== {set_up} (L1, simulated); saturation {rates[set_up]:.2f} requests/s")
        found += _closed(closed, set_up, policies, static, baselines, subject)
        found += _poisson(poisson, set_up, policies, static, subject)
        found += _dynamic(dynamic, set_up, policies, baselines, subject)
        for load in crossover.loads(set_up):
            switches = crossover(set_up, load, subject, "switches_s")
            moves = sum(crossover(set_up, load, subject, name) for name in ("evictions", "reloads"))
            per_30_s = 30.0 * moves / crossover(set_up, load, subject, "seconds")
            found.append(met(f"{set_up} (d) {load}: switches/s", switches, 1.0, at_most=True))
            found.append(met(f"{set_up} (d) {load}: evictions and reloads per 30 s", per_30_s, 1.0, at_most=True))
    print(f"\nThroughput of {subject} over each, percent: this model (a), and the paper's measurement")
    print(table(("over", "model", "paper"), beside_the_paper(closed, policies, subject)))
    print(f"\nBars, for {subject}")
    print(bars(found))
    return found


def _closed(
    means: Means, set_up: str, policies: Sequence[str], static: Sequence[str], baselines: Sequence[str], subject: str
) -> list[dict[str, object]]:
    loads = means.loads(set_up)

    def tokens(policy: str, load: str) -> float:
        return means(set_up, load, policy, "throughput")

    def ratio(other: str) -> float:
        return float(np.mean([tokens(subject, load) / tokens(other, load) for load in loads]))

    print("(a) closed loop: tokens/s by clients")
    print(table(("policy", *loads), [(policy, *(tokens(policy, load) for load in loads)) for policy in policies]))
    best = [max(tokens(policy, load) for policy in static) for load in loads]
    found = [
        met(f"{set_up} (a) {load} clients: / best static", tokens(subject, load) / top, 0.98)
        for load, top in zip(loads, best, strict=True)
    ]
    if "oracle" in policies:
        found.append(met(f"{set_up} (a) mean: / oracle", ratio("oracle"), 0.97))
    if "off" in policies:
        found.append(met(f"{set_up} (a) mean: / off", ratio("off"), 1.3))
    found += [met(f"{set_up} (a) mean: / {other}", ratio(other), 1.0) for other in baselines]
    if "no-draft" in policies:
        top = tokens(subject, loads[-1]) / tokens("no-draft", loads[-1])
        found.append(met(f"{set_up} (a) {loads[-1]} clients: / no draft loaded", top, 0.99))
    if "static:3" in policies:
        cold = min(
            means(set_up, load, subject, "cold_throughput") / means(set_up, load, "static:3", "cold_throughput")
            for load in loads
        )
        found.append(met(f"{set_up} (a) first 200 steps, worst rung: / static:3", cold, 0.95))
    return found


def _open_table(means: Means, set_up: str, load: str, policies: Sequence[str]) -> str:
    rows = [(policy, *(means(set_up, load, policy, name) for name in OPEN_COLUMNS.values())) for policy in policies]
    return table((load, *OPEN_COLUMNS), rows)


def _poisson(
    means: Means, set_up: str, policies: Sequence[str], static: Sequence[str], subject: str
) -> list[dict[str, object]]:
    loads = means.loads(set_up)
    found = []
    print("\n(b) Poisson arrivals, by share of saturation")
    for load in loads:
        print(_open_table(means, set_up, load, policies) + "\n")
        best = min(means(set_up, load, policy, "e2e.mean") for policy in static)
        own = means(set_up, load, subject, "e2e.mean")
        found.append(met(f"{set_up} (b) {load}: mean latency / best static", own / best, 1.02, at_most=True))
    print("highest share of saturation at which 90 % of requests meet the SLO")
    rows = []
    for policy in policies:
        sustained = [float(load) for load in loads if means(set_up, load, policy, "attainment") >= 0.9]
        rows.append((policy, max(sustained, default=float("nan"))))
    print(table(("policy", "share"), rows))
    return found


def _dynamic(
    means: Means, set_up: str, policies: Sequence[str], baselines: Sequence[str], subject: str
) -> list[dict[str, object]]:
    found = []
    # `no-draft` and `oracle` know or save what a server cannot; they are limits, not rivals.
    rivals = [policy for policy in policies if policy not in (subject, "oracle", "no-draft")]
    print("\n(c) changing load")
    for load in means.loads(set_up):
        print(_open_table(means, set_up, load, policies) + "\n")
        own = means(set_up, load, subject, "e2e.mean")
        least = min((means(set_up, load, policy, "e2e.mean") for policy in rivals), default=float("nan"))
        found.append(met(f"{set_up} (c) {load}: mean latency / best other", own / least, 1.0, at_most=True))
        own = means(set_up, load, subject, "goodput")
        for name, others, bar in (("other", rivals, 1.0), ("baseline", baselines, 1.05)):
            most = max((means(set_up, load, policy, "goodput") for policy in others), default=float("nan"))
            found.append(met(f"{set_up} (c) {load}: goodput / best {name}", own / max(most, 1e-9), bar))
    return found


def beside_the_paper(means: Means, policies: Sequence[str], subject: str) -> list[tuple[str, float, float]]:
    """Percent of throughput that `subject` gains over each: (over whom, here, in the paper).

    The paper's gains are of its own data and rates; ours are the mean over set-ups and rungs of (a), `means`.
    """
    rows = []
    for other, percent in PAPER.items():
        if other in policies:
            ratios = [
                means(set_up, load, subject, "throughput") / means(set_up, load, other, "throughput")
                for set_up in means.set_ups
                for load in means.loads(set_up)
            ]
            rows.append((other, 100.0 * (float(np.mean(ratios)) - 1.0), percent))
    return rows
