"""The paper's headline figures beside ours, at every level that has them.

Paper: arXiv 2512.22420 (v3). Its figures are of its own machines, data and rates; docs/results.md says what differs.
"""

from collections.abc import Iterator, Sequence

from evidence import served
from evidence.simulated import means, policies
from evidence.sources import Source
from sglang_nightjar.simulate.suite_paper_report import PAPER, beside_the_paper
from sglang_nightjar.simulate.table import markdown

# What -> the paper's figure, in words. Those of `PAPER` come before them.
OTHERS = {
    "latency against static:3, best load": "-20.2 %",
    "latency against off, best load": "-38.4 %",
    "static:3 against off, worst load": "-30 %",
    "elastic memory on against off, best load": "+5.6 %",  # 6315.9 and 5982.6 tokens/s at 35 requests/s
    "deciding, of a decode step": "10 us of 34 ms",
}
_BANDITS = {"banditspec-ucb": "BanditSpec (UCB)", "banditspec-exp3": "BanditSpec (EXP3)"}


def table(sources: Sequence[Source]) -> str:
    """A row per figure, a column per level; each of ours says which file it is of."""
    cells: dict[tuple[str, str], list[str]] = {}
    for source in sources:
        for what, figure in _figures(source):
            cells.setdefault((what, source.level), []).append(f"{figure} ({source.name})")
    levels = sorted({source.level for source in sources if source.level in ("L1", "L2", "L3", "L4")})
    paper = {_over(other): f"{percent:+.1f} %" for other, percent in PAPER.items()} | OTHERS
    rows = [
        (what, figure, *(", ".join(cells.get((what, level), ["-"])) for level in levels))
        for what, figure in paper.items()
    ]
    return markdown(("figure", "paper", *levels), rows)


def _over(other: str) -> str:
    return f"throughput over {_BANDITS.get(other, other)}, mean of the closed loops"


def _figures(source: Source) -> Iterator[tuple[str, str]]:
    """What this file has of `PAPER` and `OTHERS`."""
    if source.form == "paper":
        yield from _simulated(source)
    elif source.form == "serving":
        yield from _served(source)
    elif source.form == "deciding":
        own = next((row for row in source.data["policies"] if row["policy"] == "nightjar"), None)
        if own is not None:
            yield "deciding, of a decode step", f"{own['both_median_us']:.0f} us"


def _simulated(source: Source) -> Iterator[tuple[str, str]]:
    subject, names = source.data["subject"], policies(source, "closed")
    closed = means(source, "closed")
    for other, percent, _ in beside_the_paper(closed, names, subject):
        yield _over(other), f"{percent:+.1f} %"
    for other in ("static:3", "off"):
        if other in names:
            ratios = [
                found(set_up, load, subject, "e2e.mean") / found(set_up, load, other, "e2e.mean")
                for found in (means(source, "poisson"), means(source, "dynamic"))
                for set_up in found.set_ups
                for load in found.loads(set_up)
            ]
            yield f"latency against {other}, best load", change(min(ratios))
    if {"static:3", "off"} <= set(names):
        ratios = [
            closed(set_up, load, "static:3", "throughput") / closed(set_up, load, "off", "throughput")
            for set_up in closed.set_ups
            for load in closed.loads(set_up)
        ]
        yield "static:3 against off, worst load", change(min(ratios))


def _served(source: Source) -> Iterator[tuple[str, str]]:
    names, own, rate = served.names(source, "policy"), served.subject(source), served.rate(source)

    loads = served.names(source, "load")
    closed = [load for load in loads if load[0] == "c" and load[1:].isdigit()]  # else arrivals limit throughput

    def ratios(over: str, under: str, figure: str, loads: list[str]) -> list[float]:
        return [
            served.middle(source, over, load, figure) / served.middle(source, under, load, figure) for load in loads
        ]

    for other in PAPER:
        if other in names and other != own and closed:
            gains = ratios(own, other, rate, closed)
            yield _over(other), change(sum(gains) / len(gains))
    for other in ("static:3", "off"):
        if other in names:
            yield f"latency against {other}, best load", change(min(ratios(own, other, "mean_e2e_latency_ms", loads)))
    if {"static:3", "off"} <= set(names):
        yield "static:3 against off, worst load", change(min(ratios("static:3", "off", rate, loads)))
    fixed = f"{own}+elastic:off"
    if fixed in names:
        yield "elastic memory on against off, best load", change(max(ratios(own, fixed, rate, loads)))


def change(ratio: float) -> str:
    """1.2 as +20.0 %."""
    return f"{100 * (ratio - 1):+.1f} %"
