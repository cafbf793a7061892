"""The simulator's suites and scenarios: what is kept of their JSON, and its return to what their own code reads."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang_nightjar.simulate import suite_regret
from sglang_nightjar.simulate.metrics import Metrics, Spread
from sglang_nightjar.simulate.scenario import Result
from sglang_nightjar.simulate.suite_paper_report import OPEN_COLUMNS, Means

# Kept figures of the paper suite's parts; (d) is in its bars.
FIGURES: dict[str, tuple[str, ...]] = {
    "closed": ("throughput", "cold_throughput", "mean_gamma", "switches_s"),
    "poisson": (*OPEN_COLUMNS.values(), "attainment", "mean_gamma"),
    "dynamic": (*OPEN_COLUMNS.values(), "attainment", "mean_gamma"),
}


def kept_paper(raw: dict[str, Any]) -> dict[str, Any]:
    """Means over the seeds, a row for each set-up, load and policy."""
    kept: dict[str, Any] = {name: raw[name] for name in ("subject", "saturation_requests_s", "bars")}
    kept["seeds"] = len({row["seed"] for row in raw["closed"]})
    kept["figures"] = FIGURES
    for part, figures in FIGURES.items():
        means = Means([row | {"metrics": _namespace(row["metrics"])} for row in raw[part]])
        names = dict.fromkeys((row["set_up"], row["load"], row["policy"]) for row in raw[part])
        kept[part] = [[*name, *(float(f"{means(*name, figure):.5g}") for figure in figures)] for name in names]
    return kept


def paper_rows(data: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Rows as the suite's own code reads them."""
    figures = data["figures"][part]
    return [
        {"set_up": set_up, "load": load, "policy": policy, "metrics": _nested(dict(zip(figures, values, strict=True)))}
        for set_up, load, policy, *values in data[part]
    ]


def kept_regret(raw: dict[str, Any]) -> dict[str, Any]:
    """The summary as it is; of the changes the means over the seeds, and decisions until recovered."""
    changes = []
    for world, policy in dict.fromkeys((row["world"], row["policy"]) for row in raw["changes"]):
        own = [row for row in raw["changes"] if (row["world"], row["policy"]) == (world, policy)]
        loss, best = (np.mean([row[key] for row in own], axis=0).tolist() for key in ("loss", "best"))
        excess = float(np.mean([row["excess"] for row in own]))
        recovered = suite_regret.recovered_after(loss, best)
        changes.append({"world": world, "policy": policy, "excess": excess, "recovered_after": recovered})
    seeds = len({row["seed"] for row in raw["stationary"]})
    return {name: raw[name] for name in ("subject", "bars", "summary")} | {"seeds": seeds, "changes": changes}


def kept_scenario(raw: dict[str, Any]) -> dict[str, Any]:
    """The timeline of the first seed only."""
    scenario = {key: value for key, value in raw["scenario"].items() if key != "folder"}
    first = raw["scenario"].get("seed", 0)
    results = [row if row["seed"] == first else row | {"timeline": {}} for row in raw["results"]]
    return {"scenario": scenario, "results": results}


def scenario_results(data: dict[str, Any]) -> list[Result]:
    """As `run_scenario` gave them."""
    results = []
    for row in data["results"]:
        plain = {key: _number(value) for key, value in row["metrics"].items()}
        for key in ("e2e", "ttft", "tpot"):
            plain[key] = Spread(**{name: _number(value) for name, value in row["metrics"][key].items()})
        plain["gammas"] = tuple(plain["gammas"])
        results.append(Result(**{**row, "metrics": Metrics(**plain)}))
    return results


def _number(value: Any) -> Any:
    """JSON has no NaN."""
    return float("nan") if value is None else value


def _namespace(metrics: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{key: _namespace(value) if isinstance(value, dict) else _number(value) for key, value in metrics.items()}
    )


def _nested(flat: dict[str, Any]) -> SimpleNamespace:
    """{"e2e.mean": 1.0} as an object whose `e2e.mean` it is."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        at = tree
        *folders, last = name.split(".")
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = value
    return _namespace(tree)
