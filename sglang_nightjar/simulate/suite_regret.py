"""`--suite regret`: regret of the bandits in stationary worlds, and recovery after an abrupt change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_nightjar.simulate.acceptance import AcceptanceSpec, Domain, mean_alpha
from sglang_nightjar.simulate.jobs import run_all
from sglang_nightjar.simulate.kept import Kept
from sglang_nightjar.simulate.planners import Context, default_subject, known, make_policy
from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.setups import find_set_up
from sglang_nightjar.simulate.stationary import World, log_spaced, run
from sglang_nightjar.simulate.table import bars, met, table

_SETTLED = 100_000  # decisions after which the excess over the oracle is judged
_RECOVERY = 200  # decisions a policy has to find the new best
_WINDOW = 500  # decisions over which a loss is averaged when judging recovery


def _world(name: str, set_up: str, alpha: float, batches: tuple[int, ...], weights: tuple[float, ...]) -> World:
    spec = AcceptanceSpec(domains=(Domain(alpha),))
    return World(name, StepCost(find_set_up(set_up)), mean_alpha(spec, 1024), batches, weights)


# Name -> (set-up, alpha, batch sizes, weights, most decisions).
STATIONARY: dict[str, tuple[str, float, tuple[int, ...], tuple[float, ...], int]] = {
    "4090, B 16": ("4090-r1-qwen-7b", 0.7, (16,), (1.0,), 1_000_000),
    "4090, B 8 to 128": ("4090-r1-qwen-7b", 0.7, (8, 32, 64, 128), (1.0, 1.0, 1.0, 1.0), 1_000_000),
    "4090, B 192": ("4090-r1-qwen-7b", 0.7, (192,), (1.0,), 100_000),
    "A100, B 8 to 64": ("a100-vicuna-13b", 0.5, (8, 24, 64), (1.0, 2.0, 1.0), 100_000),
    "2xL20, B 4": ("2xl20-qwen-32b", 0.65, (4,), (1.0,), 100_000),
}
# Name -> (set-up, (alpha, batch) before, (alpha, batch) after).
CHANGES: dict[str, tuple[str, tuple[float, int], tuple[float, int]]] = {
    "4090, alpha 0.75 to 0.3": ("4090-r1-qwen-7b", (0.75, 16), (0.3, 16)),
    "4090, alpha 0.3 to 0.75": ("4090-r1-qwen-7b", (0.3, 16), (0.75, 16)),
    "4090, B 8 to 192": ("4090-r1-qwen-7b", (0.7, 8), (0.7, 192)),
    "4090, B 192 to 8": ("4090-r1-qwen-7b", (0.7, 192), (0.7, 8)),
    "2xL20, alpha 0.7 to 0.2": ("2xl20-qwen-32b", (0.7, 8), (0.2, 8)),
    "2xL20, B 64 to 4": ("2xl20-qwen-32b", (0.65, 64), (0.65, 4)),
}


def _context(world: World, alpha: float, seed: int) -> Context:
    return Context(world.cost.max_gamma, seed, world.cost, AcceptanceSpec(domains=(Domain(alpha),)), 200.0)


def stationary_run(name: str, policy: str, decisions: int, seed: int) -> dict[str, Any]:
    """One policy in one stationary world: regret at log-spaced counts, and the excess over the oracle's loss."""
    set_up, alpha, batches, weights, _ = STATIONARY[name]
    world = _world(name, set_up, alpha, batches, weights)
    result = run(make_policy(policy, _context(world, alpha, seed)), [world], [decisions], seed)
    at = log_spaced(decisions)
    settled = min(_SETTLED, decisions)
    loss, best = result.loss[:settled], result.best[:settled]
    late = slice(settled // 2, settled)
    return {
        "world": name,
        "policy": policy,
        "seed": seed,
        "decisions": at,
        "regret": result.regret(at),
        "excess": float(loss.sum() / best.sum() - 1.0),
        "late_excess": float(loss[late].sum() / best[late].sum() - 1.0),
    }


def change_run(name: str, policy: str, decisions: int, seed: int) -> dict[str, Any]:
    """One policy through an abrupt change: excess over the new oracle from `_RECOVERY` decisions on."""
    set_up, before, after = CHANGES[name]
    worlds = [_world(name, set_up, alpha, (batch,), (1.0,)) for alpha, batch in (before, after)]
    result = run(make_policy(policy, _context(worlds[0], before[0], seed)), worlds, [decisions, decisions], seed)
    loss, best = result.loss[decisions:], result.best[decisions:]
    end = _RECOVERY + _WINDOW
    return {
        "world": name,
        "policy": policy,
        "seed": seed,
        "excess": float(loss[_RECOVERY:end].sum() / best[_RECOVERY:end].sum() - 1.0),
        "loss": loss[:end].tolist(),
        "best": best[:end].tolist(),
    }


def recovered_after(loss: Sequence[float], best: Sequence[float], within: float = 0.05, window: int = 100) -> float:
    """Decisions until the mean loss of the next `window` is within `within` of the oracle's; NaN: never."""
    own = np.convolve(loss, np.ones(window), "valid")
    oracle = np.convolve(best, np.ones(window), "valid")
    good = np.flatnonzero(own <= (1.0 + within) * oracle)
    return float(good[0]) if len(good) else float("nan")


def slope(decisions: Sequence[int], regret: Sequence[float]) -> float:
    """Log-log slope of mean regret over the counts; regret at or below 0 is left out (NaN when too few remain)."""
    x, y = np.asarray(decisions, float), np.asarray(regret)
    keep = y > 0
    return float(np.polyfit(np.log(x[keep]), np.log(y[keep]), 1)[0]) if keep.sum() > 1 else float("nan")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval (normal approximation)."""
    array = np.asarray(values)
    half = 1.96 * array.std(ddof=1) / np.sqrt(len(array)) if len(array) > 1 else float("nan")
    return float(array.mean()), float(half)


def run_suite(
    policies: Sequence[str] | None,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    quick: bool = False,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Runs it, prints tables and bars, and returns every figure. `keep`: a file of finished runs, see `kept`."""
    kept: Kept[dict[str, Any]] | None = Kept(keep, dict) if keep else None
    chosen = list(policies or known(("paper", "nightjar", "banditspec-ucb", "banditspec-exp3")))
    count = seeds or (2 if quick else 20)
    subject = default_subject(chosen)
    most = 3000 if quick else 1_000_000
    tasks = [
        (name, policy, min(most, world[4]), seed)
        for name, world in STATIONARY.items()
        for policy in chosen
        for seed in range(count)
    ]
    still = run_all(stationary_run, tasks, jobs, "regret", kept)
    tasks = [
        (name, policy, 1000 if quick else 5000, seed) for name in CHANGES for policy in chosen for seed in range(count)
    ]
    changed = run_all(change_run, tasks, jobs, "changes", kept)
    summary, found = report(still, changed, chosen, subject)
    return {
        "level": "L1",
        "subject": subject,
        "summary": summary,
        "stationary": still,
        "changes": changed,
        "bars": found,
    }


def report(
    still: Sequence[dict[str, Any]], changed: Sequence[dict[str, Any]], chosen: Sequence[str], subject: str
) -> tuple[list[dict[str, Any]], list[dict[str, object]]]:
    """Prints everything; returns regret by world and policy, and the bars."""
    found: list[dict[str, object]] = []
    rows: list[tuple[object, ...]] = []
    summary = []
    for name in STATIONARY:
        for policy in chosen:
            own = [result for result in still if result["world"] == name and result["policy"] == policy]
            means, halves = zip(
                *(interval(point) for point in zip(*(r["regret"] for r in own), strict=True)), strict=True
            )
            steep = slope(own[0]["decisions"], means)
            excess, late = (float(np.mean([r[key] for r in own])) for key in ("excess", "late_excess"))
            entry = {
                "world": name,
                "policy": policy,
                "decisions": own[0]["decisions"],
                "mean": means,
                "half_95": halves,
            }
            summary.append(entry | {"slope": steep, "excess": excess, "late_excess": late})
            rows.append((name, policy, own[0]["decisions"][-1], means[-1], halves[-1], steep, 100 * excess, 100 * late))
            if policy == subject:
                found.append(met(f"{subject}, {name}: slope", steep, 0.55, at_most=True))
                settled = min(_SETTLED, own[0]["decisions"][-1])
                found.append(met(f"{subject}, {name}: excess at T = {settled:g}", excess, 0.03, at_most=True))
    print("Regret in stationary worlds (L1), against the oracle with switching cost")
    head = ("world", "policy", "T", "regret s/token", "+-95 %", "slope", "excess %", "excess late %")
    print(table(head, rows))
    rows = []
    for name in CHANGES:
        for policy in chosen:
            own = [result for result in changed if result["world"] == name and result["policy"] == policy]
            excess = float(np.mean([r["excess"] for r in own]))
            after = recovered_after(
                np.mean([r["loss"] for r in own], axis=0).tolist(), np.mean([r["best"] for r in own], axis=0).tolist()
            )
            rows.append((name, policy, 100 * excess, after))
            if policy == subject:
                found.append(met(f"{subject}, {name}: excess after {_RECOVERY} decisions", excess, 0.05, at_most=True))
    print("\nAfter an abrupt change: excess over the new oracle, and decisions until within 5 % of it")
    print(table(("change", "policy", "excess %", "decisions"), rows))
    print("\n" + bars(found))
    return summary, found
