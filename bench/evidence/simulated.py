"""Tables of the simulator's suites and scenarios (L1)."""

from collections.abc import Sequence
from typing import Any

from evidence.sources import Source
from evidence.suites import paper_rows, scenario_results
from sglang_nightjar.simulate.__main__ import COLUMNS
from sglang_nightjar.simulate.planners import BASELINES
from sglang_nightjar.simulate.scenario import metric
from sglang_nightjar.simulate.suite_paper_report import OPEN_COLUMNS, Means
from sglang_nightjar.simulate.table import markdown

SHARE = {"poisson": "share of saturation", "dynamic": "load"}


def means(source: Source, part: str) -> Means:
    """Means over the seeds of a part of the paper suite."""
    return Means(paper_rows(source.data, part))


def policies(source: Source, part: str) -> list[str]:
    """In the suite's order."""
    return list(dict.fromkeys(row[2] for row in source.data[part]))


def closed(source: Source, set_up: str) -> str:
    """(a) of one set-up: tokens/s by policy and clients."""
    found = means(source, "closed")
    loads = found.loads(set_up)
    rows = [(name, *(found(set_up, load, name, "throughput") for load in loads)) for name in policies(source, "closed")]
    saturation = source.data["saturation_requests_s"][set_up]
    return f"{set_up}, tokens/s by clients; saturation {saturation:.3g} requests/s.\n\n" + markdown(
        ("policy", *loads), rows
    )


def closed_ratios(source: Source) -> str:
    """(a) of all set-ups: the subject against others, from the suite's bars."""
    subject = source.data["subject"]
    heads = ("best static, worst rung", "oracle, mean", "off, mean", "worst of the baselines, mean", "no draft loaded")
    rows = []
    for set_up in source.data["saturation_requests_s"]:
        by_name = {
            bar["name"].removeprefix(f"{set_up} (a) "): bar["value"]
            for bar in source.data["bars"]
            if bar["name"].startswith(f"{set_up} (a) ")
        }
        others = {name: value for name, value in by_name.items() if name.removeprefix("mean: / ") in BASELINES}
        hardest = min(others, key=lambda name: others[name], default="")
        rows.append(
            (
                set_up,
                least(value for name, value in by_name.items() if name.endswith("/ best static")),
                ratio(by_name.get("mean: / oracle")),
                ratio(by_name.get("mean: / off")),
                f"{ratio(others.get(hardest))} ({hardest.removeprefix('mean: / ')})" if others else "-",
                least(value for name, value in by_name.items() if name.endswith("/ no draft loaded")),
                least(value for name, value in by_name.items() if name.endswith("/ static:3")),
            )
        )
    required = ("required, at least", "0.98", "0.97", "1.3", "1.0", "0.99", "0.95")
    heads = (f"`{subject}` against", *heads, "static:3, first 200 steps, worst rung")
    return "Tokens/s as ratios over the ladder.\n\n" + markdown(heads, (required, *rows))


def poisson(source: Source) -> str:
    """(b): mean latency against the best static policy of that rate, the oracle's in brackets."""
    found, subject = means(source, "poisson"), source.data["subject"]
    names = policies(source, "poisson")
    static = [name for name in names if name == "off" or name.startswith("static:")]
    rows, loads = [], found.loads(found.set_ups[0])
    for set_up in found.set_ups:
        cells = []
        for load in loads:
            best = min(found(set_up, load, name, "e2e.mean") for name in static)
            own, oracle = (found(set_up, load, name, "e2e.mean") / best for name in (subject, "oracle"))
            cells.append(f"{ratio(own)} ({ratio(oracle)})" if "oracle" in names else ratio(own))
        rows.append((set_up, *cells))
    text = f"`{subject}`: mean latency over that of the best static policy of each rate (at most 1.02), by share of "
    return text + "saturation; in brackets, the oracle's.\n\n" + markdown(("set-up", *loads), rows)


def dynamic(source: Source) -> str:
    """(c): latency against the best other policy, goodput against the best baseline, and what the oracle reaches."""
    found, subject = means(source, "dynamic"), source.data["subject"]
    names = policies(source, "dynamic")
    rivals = [name for name in names if name not in (subject, "oracle", "no-draft")]
    baselines = [name for name in names if name in BASELINES]
    rows = []
    for set_up in found.set_ups:
        for load in found.loads(set_up):

            def of(name: str, figure: str, set_up: str = set_up, load: str = load) -> float:
                return found(set_up, load, name, figure)

            least_s = min((of(name, "e2e.mean") for name in rivals), default=float("nan"))
            most = max((of(name, "goodput") for name in baselines), default=float("nan"))
            rows.append(
                (
                    set_up,
                    load,
                    of(subject, "e2e.mean"),
                    ratio(of(subject, "e2e.mean") / least_s),
                    ratio(of("oracle", "e2e.mean") / least_s),
                    of(subject, "goodput"),
                    ratio(of(subject, "goodput") / max(most, 1e-9)),
                    ratio(of("oracle", "goodput") / max(most, 1e-9)),
                    f"{100 * of(subject, 'attainment'):.0f} %",
                )
            )
    heads = ("set-up", "load", "latency, s", "/ best other", "oracle's", "goodput, requests/s", "/ best baseline")
    text = f"`{subject}`: mean latency (required: at most 1 times the best other policy's) and goodput (at least 1.05 "
    text += "times the best baseline's; baselines are SGLang's, DSD, BanditSpec and TETRIS).\n\n"
    return text + markdown((*heads, "oracle's", "within the SLO"), rows, left=2)


def loads(source: Source, set_up: str) -> str:
    """(b) and (c) of one set-up in full: a table of policies and figures for each load."""
    parts = []
    for part, word in SHARE.items():
        found = means(source, part)
        for load in found.loads(set_up):
            rows = [
                (name, *(found(set_up, load, name, figure) for figure in OPEN_COLUMNS.values()))
                for name in policies(source, part)
            ]
            parts.append(f"**{set_up}, {word} {load}**\n\n" + markdown(("policy", *OPEN_COLUMNS), rows))
    return "\n\n".join(parts)


def bars(source: Source) -> str:
    """How many of a suite's requirements are met, and those that are not."""
    found: Sequence[dict[str, Any]] = source.data["bars"]
    missed = [bar for bar in found if not bar["met"]]
    text = f"Requirements of the suite, for `{source.data['subject']}`, {times(source.data['seeds'], 'seed')}: "
    text += f"{len(found) - len(missed)} of {len(found)} met."
    if not missed:
        return text
    rows = [
        (bar["name"], ratio(bar["value"], 4), f"{'at most' if bar['at_most'] else 'at least'} {bar['bar']:g}")
        for bar in missed
    ]
    return f"{text} Missed:\n\n" + markdown(("requirement", "figure", "required"), rows)


def crossover(source: Source) -> str:
    """(d), from the suite's bars."""
    rows = [
        (bar["name"].replace(" (d)", ","), bar["value"], f"{bar['bar']:g}")
        for bar in source.data["bars"]
        if " (d) " in bar["name"]
    ]
    return markdown(("held at the crossover", "figure", "at most"), rows)


def regret(source: Source) -> str:
    """Regret by world and policy."""
    rows = []
    for entry in source.data["summary"]:
        half = entry["half_95"][-1]
        figure = f"{entry['mean'][-1]:.3g}" + ("" if half is None else f" +- {half:.2g}")
        excess = f"{100 * entry['excess']:.2g} %"
        rows.append(
            (entry["world"], entry["policy"], f"{entry['decisions'][-1]:,}", figure, ratio(entry["slope"]), excess)
        )
    heads = ("world", "policy", "T", "regret, mean +- 95 %", "slope", "loss above the oracle's")
    text = "Regret against the oracle with switching cost, seconds per token summed over T decisions; slope of the "
    text += "log-log line from 10^3 on; loss above the oracle's over the first 10^5 decisions "
    text += f"(`{source.data['subject']}`: slope at most 0.55, loss at most 3 %); "
    text += f"{times(source.data['seeds'], 'seed')}.\n\n"
    return text + markdown(heads, rows, left=2)


def changes(source: Source) -> str:
    """After an abrupt change: a row per change, a column per policy."""
    found = {(row["world"], row["policy"]): row for row in source.data["changes"]}
    worlds, names = (list(dict.fromkeys(key[index] for key in found)) for index in (0, 1))
    rows = [(world, *(f"{100 * found[world, name]['excess']:.2g}" for name in names)) for world in worlds]
    text = "After an abrupt change, loss above the new oracle's from the 200th decision to the 700th "
    text += f"(`{source.data['subject']}`: at most 5 %), percent.\n\n"
    return text + markdown(("change", *names), rows)


def scenario(source: Source) -> str:
    """A scenario: policies and figures, means over the seeds."""
    results = scenario_results(source.data)
    rows = []
    for name in dict.fromkeys(result.policy for result in results):
        own = [result for result in results if result.policy == name]
        rows.append((name, *(by * sum(metric(r, figure) for r in own) / len(own) for figure, by in COLUMNS.values())))
    seeds = len({result.seed for result in results})
    about = source.data["scenario"]
    return f"{about['name']}: set-up {about['set_up']}, mean of {times(seeds, 'seed')}.\n\n" + markdown(
        ("policy", *COLUMNS), rows
    )


def ratio(value: float | None, decimals: int = 3) -> str:
    """A dash where there is none."""
    return "-" if value is None or value != value else f"{value:.{decimals}f}"


def least(values: Any) -> str:
    """The smallest that is known, as a ratio."""
    return ratio(min((value for value in values if value is not None), default=None))


def times(count: int, word: str) -> str:
    """3 seeds."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
