"""What `bench/overhead.py` makes of the rows of its servers' schedulers: steps, figures, a table."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meter import CallCost, net
from metered_launch import DEVICE, FACTS, METER, SGLANG, Layout

from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.setups import SET_UPS

PLAIN = "plain"  # the server without a draft
AT_GAMMA_0 = ("gamma 0", "away", "journal")  # servers that could speculate, and do not
REQUIRED = 0.02  # of a plain step


@dataclass
class Steps:
    """Decode steps, us of each. `own`: Nightjar's, by owner; `device`, `rest`: as the wall has them; `cpu`: of all
    but the device."""

    own: dict[str, list[float]] = field(default_factory=dict)
    device: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def nightjar(self) -> list[float]:
        return [sum(parts) for parts in zip(*self.own.values(), strict=True)]


def full_steps(rows: Any, layout: Layout, batch: int, *, speculating: bool) -> Steps:
    """The decode steps of all `batch` requests among consecutive `rows`, each after another such step, at a gamma
    above 0 or of 0; what metering itself took is taken off."""
    cost, owners, count = CallCost(layout.inside_ns, layout.outside_ns), layout.owners, len(layout.owners)
    facts = {name: rows[:, index] for index, name in enumerate(FACTS)}
    ours = [name for name in owners if name not in (DEVICE, SGLANG, METER)]
    found = Steps({name: [] for name in ours})
    full = (facts["batch_size"] == batch) & (facts["prefill"] == 0) & ((facts["gamma"] > 0) == speculating)
    for number in range(1, len(rows)):
        if not (full[number] and full[number - 1]):
            continue
        change = (rows[number] - rows[number - 1]).tolist()
        spent, entered, made = (change[len(FACTS) + part * count :][:count] for part in range(3))
        us = {name: value / 1e3 for name, value in zip(owners, net(spent, entered, made, cost), strict=True)}
        for name in ours:
            found.own[name].append(us[name])
        found.device.append(us[DEVICE])
        found.rest.append(us[SGLANG])
        # Of all metered calls, those of the meter itself left out: their time is in no row.
        metering = cost.inside * sum(entered) + cost.outside * sum(made)
        found.cpu.append((change[FACTS.index("cpu_ns")] - metering) / 1e3)
    return found


def pooled(turns: Sequence[Steps]) -> Steps:
    return Steps(
        {name: [us for each in turns for us in each.own[name]] for name in turns[0].own},
        *([us for each in turns for us in getattr(each, name)] for name in ("device", "rest", "cpu")),
    )


def figures(turns: Sequence[Steps], plain_turns: Sequence[Steps]) -> dict[str, Any]:
    """Of one server, us per step; ratios to a step, and to the scheduler's share of one, of the plain server."""
    all_steps, plain = pooled(turns), pooled(plain_turns)
    if not all_steps.cpu:
        raise SystemExit("no step of a full batch was seen; give more --tokens, or fewer requests per --batch")
    plain_rest = statistics.median(plain.rest) + statistics.median(plain.nightjar)
    plain_step = statistics.median(plain.device) + plain_rest
    nightjar = spread(all_steps.nightjar)
    more = [
        statistics.median(own.cpu) - statistics.median(other.cpu)
        for own, other in zip(turns, plain_turns, strict=True)
        if own.cpu and other.cpu
    ]
    return {
        "steps": len(all_steps.cpu),
        "device_us": statistics.median(all_steps.device),
        "scheduler_cpu_us": statistics.median(all_steps.cpu),
        "sglang_us": statistics.median(all_steps.rest),
        "nightjar_us": nightjar,
        "of_plain_step": nightjar["median"] / plain_step,
        "of_plain_scheduler": nightjar["median"] / plain_rest,
        "more_cpu_us": sorted(more),
        "more_cpu_of_plain_step": statistics.median(more) / plain_step,
        "by_owner_us": {name: spread(values) for name, values in all_steps.own.items() if max(values) > 0.0},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "p99": statistics.quantiles(values, n=100)[98] if len(values) > 1 else values[0],
    }


def set_ups(batch: int, kv_tokens: float) -> dict[str, float]:
    """us of a target's forward over `batch` requests with `kv_tokens` of context together, by the roofline."""
    return {name: 1e6 * StepCost(set_up).verify_s(batch, kv_tokens) for name, set_up in SET_UPS.items()}


def table(result: Mapping[str, Any]) -> str:
    """Markdown."""
    found, about = result["servers"], result["machine"]
    plain = found[PLAIN]
    plain_rest = plain["sglang_us"] + plain["nightjar_us"]["median"]
    heads = ("server", "steps", "Nightjar, us: median", "mean", "p99", "of an SGLang step", "of SGLang's scheduler",
             "more CPU than plain, us", "quartiles", "of an SGLang step")  # fmt: skip
    lines = [
        f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f}, {about['date']}, commit {about['commit']}.",
        f"A plain step at batch {result['options']['batch']} on {result['options']['set_up']}: "
        f"{(plain['device_us'] + plain_rest) / 1e3:.2f} ms, {plain_rest / 1e3:.2f} of them the scheduler. "
        f"Required: at most {REQUIRED:.0%} of it.",
        "",
        "| " + " | ".join(heads) + " |",
        "| :-- |" + " ---: |" * 7 + " :-- | ---: |",
    ]
    for kind, row in found.items():
        own, more = row["nightjar_us"], row["more_cpu_us"]
        quartiles = statistics.quantiles(more, n=4) if len(more) > 1 else more * 3
        compared = f"{statistics.median(more):.0f} | {quartiles[0]:.0f} to {quartiles[2]:.0f} | "
        compared += f"{row['more_cpu_of_plain_step']:.2%}"
        lines.append(
            f"| {kind} | {row['steps']} | {own['median']:.0f} | {own['mean']:.0f} | {own['p99']:.0f} "
            f"| {row['of_plain_step']:.2%} | {row['of_plain_scheduler']:.1%} "
            f"| {compared if kind in AT_GAMMA_0 else ' | | '} |"
        )
    kinds = [kind for kind in found if kind != PLAIN]
    lines += ["", "Median (mean) us per step, by hook:", "", "| | " + " | ".join(found) + " |"]
    lines.append("| :-- |" + " ---: |" * len(found))
    for owner in dict.fromkeys(name for row in found.values() for name in row["by_owner_us"]):
        cells = [row["by_owner_us"].get(owner) for row in found.values()]
        lines.append(
            f"| {owner} | "
            + " | ".join("" if cell is None else f"{cell['median']:.1f} ({cell['mean']:.1f})" for cell in cells)
            + " |"
        )
    lines += ["", "The same time over a plain step of each set-up (its device by the roofline, this scheduler):", ""]
    lines += ["| set-up | plain step, ms | " + " | ".join(kinds) + " |", "| :-- | ---: |" + " ---: |" * len(kinds)]
    for name, device_us in result["set_ups"].items():
        step_us = device_us + plain_rest
        shares = " | ".join(f"{found[kind]['nightjar_us']['median'] / step_us:.2%}" for kind in kinds)
        lines.append(f"| {name} | {step_us / 1e3:.2f} | {shares} |")
    return "\n".join(lines)
