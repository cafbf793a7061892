"""Tables of what servers did under load: `bench/serving.py` (L3; L2 on an emulated device), `bench/calibrate.py`."""

import statistics
from typing import Any

from serving_report import moves_table, summary

from evidence.simulated import times
from evidence.sources import Source
from sglang_nightjar.simulate.table import markdown

_CALIBRATED = {"tokens/s": "tokens_s", "TTFT ms": "ttft_ms", "TPOT ms": "tpot_ms"}


def middle(source: Source, policy: str, load: str, figure: str) -> float:
    """Median over the repeats; NaN where it was not measured."""
    values = [
        sample[figure]
        for sample in source.data["samples"]
        if (sample["policy"], sample["load"]) == (policy, load) and sample.get(figure) is not None
    ]
    return float(statistics.median(values)) if values else float("nan")


def rate(source: Source) -> str:
    """The figure of tokens/s: while requests came, where that was measured; else over the whole run."""
    return "throughput" if all("throughput" in sample for sample in source.data["samples"]) else "output_throughput"


def names(source: Source, key: str) -> list[str]:
    """Policies or loads, in the order of the command line."""
    asked = str(source.data["options"][{"policy": "policies", "load": "loads"}[key]]).split(",")
    found = dict.fromkeys(sample[key] for sample in source.data["samples"])
    return [name for name in asked if name in found] + [name for name in found if name not in asked]


def subject(source: Source) -> str:
    """Whom the tables judge."""
    policies = names(source, "policy")
    return "nightjar" if "nightjar" in policies else policies[-1]


def ladder(source: Source) -> str:
    """Tokens/s of every policy by load, the subject over the best of the others, and time to first token."""
    policies, own = names(source, "policy"), subject(source)
    others = [policy for policy in policies if policy != own]
    plain = "off" if "off" in policies else policies[0]
    rows = []
    for load in names(source, "load"):
        rates = {policy: middle(source, policy, load, rate(source)) for policy in policies}
        best = max((rates[policy] for policy in others), default=float("nan"))
        ttft = " / ".join(f"{middle(source, policy, load, 'mean_ttft_ms'):.0f}" for policy in (plain, own))
        rows.append((load, *rates.values(), f"{rates[own] / best:.3f}", ttft))
    repeats = len({sample["repeat"] for sample in source.data["samples"]})
    heads = ("load", *policies, f"{own} / best other", f"TTFT ms, {plain} / {own}")
    return f"{_set_up(source)}Output tokens/s, medians of {times(repeats, 'repeat')}.\n\n" + markdown(heads, rows)


def loads(source: Source) -> str:
    """Policies and figures, a table for each load."""
    text = summary([_told(sample, source.data["options"]) for sample in source.data["samples"]])
    return f"{_set_up(source)}Medians of the repeats.\n\n{text[text.index('**') :].strip()}"


def _told(sample: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Earlier versions counted tokens over the whole run only, no requests (of `max_tokens` tokens each), and
    compared no answers."""
    if "requests" in sample:
        return sample
    whole = sample["output_throughput"]
    return {"requests": round(whole * sample["seconds"] / options["max_tokens"]), "throughput": whole} | {
        "answers": [],
        **sample,
    }


def _set_up(source: Source) -> str:
    """Of an emulated device."""
    options = source.data["options"]
    name = options["set_up"] if "set_up" in options else options.get("emulate")
    return f"{name}. " if name else ""


def pool(source: Source) -> str:
    """KV pool and draft over the whole life of each server."""
    rows = []
    for policy, known in source.data["servers"].items():
        slots = _slots(known["timeline"])
        span = f"{min(slots):.0f} to {max(slots):.0f}" if slots else "-"
        longest = _longest(known["moves"])
        moved = "; ".join(f"{kind}: {factor:.1f}" for kind, factor in longest.items())
        rows.append((policy, span, moved or "-", known["retractions"]))
    heads = ("policy", "KV slots", "longest step while the draft moved / median step", "retractions")
    return "Over all loads of a server.\n\n" + markdown(heads, rows)


def moves(source: Source) -> str:
    """Every move of the draft, of all servers."""
    made = {policy: known["moves"] for policy, known in source.data["servers"].items()}
    if any(isinstance(each, dict) for each in made.values()):
        return "The moves of this run were not kept one by one."
    return moves_table(made) or "The draft never moved."


def _slots(timeline: Any) -> list[float]:
    """KV slots over time. A run's timeline is a list of points or, in later versions, a list for each figure."""
    columns = timeline["slots"] if isinstance(timeline, dict) and timeline else [point[3] for point in timeline]
    return [count for count in columns if count is not None]


def _longest(moves: Any) -> dict[str, float]:
    """evict, reload -> the longest step in such a move. An entry for each move or, in earlier versions, each kind."""
    each = moves if isinstance(moves, list) else [{"kind": kind, **move} for kind, move in moves.items()]
    found: dict[str, float] = {}
    for move in each:
        if move["longest_over_median"] is not None:
            found[move["kind"]] = max(found.get(move["kind"], 0.0), move["longest_over_median"])
    return found


def calibrate(source: Source) -> str:
    """Each figure at each level there is, and the emulator's over those of the others."""
    options, samples = source.data["options"], source.data["samples"]
    others = [level for level in ("L3", "L1", "L1*") if any(level in sample for sample in samples)]
    heads = ["policy", "load"]
    for name in _CALIBRATED:
        heads += [f"{name}, L2", *(f"/ {level}" for level in others)]
    heads += ["device's share", "scheduler, ms/step", *(f"gamma, {level}" for level in ("L2", *others))]
    rows = []
    for sample in samples:
        seen = sample["L2"]
        cells = [sample["policy"], sample["load"]]
        for name in _CALIBRATED.values():
            cells += [seen[name]]
            cells += [f"{seen[name] / sample[level][name]:.3f}" if level in sample else "-" for level in others]
        cells += [f"{seen['device_share']:.1%}", f"{seen['scheduler_ms']:.2f}"]
        cells += [f"{sample.get(level, {}).get('mean_gamma', 0.0):.2f}" for level in ("L2", *others)]
        rows.append(cells)
    text = f"{_set_up(source)}L2 is the emulated device at {_speed(options):g} emulated seconds per second; behind its "
    text += "figures, their ratio to other levels'; L1* is the simulator with what the scheduler took at L2.\n\n"
    return text + markdown(heads, rows, left=2)


def _speed(options: dict[str, Any]) -> float:
    return float(options["speed"] if "speed" in options else options["emulate_speed"])
