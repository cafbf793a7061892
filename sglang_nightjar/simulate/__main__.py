"""`python -m sglang_nightjar.simulate`: runs policies in a scenario, or one of the two suites."""

import argparse
import sys
from pathlib import Path
from typing import Any

from sglang_nightjar.errors import UserError
from sglang_nightjar.observe.machine import machine
from sglang_nightjar.simulate.fields import as_json
from sglang_nightjar.simulate.jobs import run_all
from sglang_nightjar.simulate.planners import check_name
from sglang_nightjar.simulate.scenario import Result, built_in, metric, read_scenario, run_scenario, with_trace
from sglang_nightjar.simulate.table import table

# Of a scenario's table: column -> (figure, factor).
COLUMNS = {
    "tok/s": ("throughput", 1.0),
    "goodput/s": ("goodput", 1.0),
    "SLO %": ("attainment", 100.0),
    "e2e s": ("e2e.mean", 1.0),
    "p99": ("e2e.p99", 1.0),
    "ttft s": ("ttft.mean", 1.0),
    "ttft p99": ("ttft.p99", 1.0),
    "tpot ms": ("tpot.mean", 1000.0),
    "tpot p99": ("tpot.p99", 1000.0),
    "gamma": ("mean_gamma", 1.0),
    "switch/s": ("switches_s", 1.0),
    "evict": ("evictions", 1.0),
    "preempt": ("preemptions", 1.0),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m sglang_nightjar.simulate",
        description="Simulates serving with speculative decoding (evidence level L1: no model runs).",
    )
    p.add_argument("--scenario", metavar="NAME", help=f"a scenario file, or one of: {', '.join(built_in())}")
    p.add_argument("--policies", default="off,static:3,oracle", help="comma-separated (default: off,static:3,oracle)")
    p.add_argument("--seeds", type=int, default=None, metavar="N", help="runs per policy (default: 3; a suite's own)")
    p.add_argument("--trace", metavar="FILE", help="arrivals and lengths of an Azure, BurstGPT or Mooncake trace")
    p.add_argument("--rate", type=float, metavar="R", help="with --trace: scale its mean rate to R requests/s")
    p.add_argument("--suite", choices=("regret", "paper"), help="run a suite instead of a scenario")
    p.add_argument("--replay", metavar="FILE", help="put --policies in the place of the one that wrote this journal")
    p.add_argument("--measure", nargs="+", metavar="FILE", help="make a set-up file (--json) of a server's journals")
    p.add_argument("--quick", action="store_true", help="with --suite: a small version, to see that it works")
    p.add_argument("--keep", metavar="FILE", help="with --suite: keep finished runs here, and do not repeat them")
    p.add_argument("--json", metavar="FILE", help="write every figure")
    p.add_argument("--plot", metavar="FILE.png", help="draw the first seed over time, or a suite's main figure")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit status is 1, with one line, for a user's mistake."""
    options = parser().parse_args(arguments)
    try:
        if options.seeds is not None and options.seeds < 1:
            raise UserError(f"--seeds is {options.seeds}; at least one run is needed")
        if options.rate is not None and not options.rate > 0:
            raise UserError(f"--rate is {options.rate}; it must be above 0")
        for name in (options.json, options.plot):
            if name:
                _writable(name)
        if options.plot:
            from sglang_nightjar.simulate.plots import drawing

            drawing()
        figures = _figures(options)
        if options.json:
            Path(options.json).write_bytes(as_json(figures))
    except UserError as error:
        print(f"[nightjar] error: {error}", file=sys.stderr)
        return 1
    return 0


def _figures(options: argparse.Namespace) -> Any:
    if options.measure:
        return _measure(options)
    found = _replay(options) if options.replay else _suite(options) if options.suite else _scenario(options)
    return found | {"machine": machine()}


def _writable(name: str) -> None:
    """Finds out before a long run, not after it."""
    try:
        Path(name).touch()
    except OSError as error:
        raise UserError(f"cannot write {name}: {error.strerror or error}") from None


def _suite(options: argparse.Namespace) -> dict[str, Any]:
    policies = options.policies.split(",") if options.policies != parser().get_default("policies") else None
    for name in policies or ():
        check_name(name)
    plain: dict[str, Any] = {"seeds": options.seeds, "jobs": options.jobs, "quick": options.quick}
    plain["keep"] = Path(options.keep) if options.keep else None
    if options.suite == "regret":
        from sglang_nightjar.simulate import suite_regret

        figures = suite_regret.run_suite(policies, **plain)
    else:
        from sglang_nightjar.simulate import suite_paper

        figures = suite_paper.run_suite(policies, **plain, trace=options.trace)
    if options.plot:
        from sglang_nightjar.simulate import plots

        if options.suite == "regret":
            plots.plot_regret(figures["summary"], options.plot)
        else:
            plots.plot_closed(figures["closed"], options.plot)
    return figures


def _replay(options: argparse.Namespace) -> dict[str, Any]:
    from sglang_nightjar.simulate.replay import replay

    names = [name.strip() for name in options.policies.split(",")]
    results = replay(Path(options.replay), [name for name in names if name != "oracle"])
    print(f"{options.replay}: costs and acceptance as the journal shows them, batch sizes as recorded")
    rows = [(r.policy, r.tokens_per_s, r.seconds, r.switches, " ".join(map(str, r.gammas))) for r in results]
    print(table(("policy", "tok/s", "seconds", "switches", "steps by gamma"), rows))
    return {"level": "L1", "journal": options.replay, "results": [vars(result) for result in results]}


def _measure(options: argparse.Namespace) -> Any:
    from sglang_nightjar.simulate.from_journal import measure

    if not options.json:
        raise UserError("--measure makes a set-up file: say where with --json FILE.json")
    points = measure([Path(name) for name in options.measure], Path(options.json).stem)
    print(f"{points.name}: milliseconds of a decode step by batch size, from {points.source}")
    rows = [(gamma, *(1e3 * s for s in row)) for gamma, row in zip(points.gammas, points.seconds, strict=True)]
    print(table(("gamma", *map(str, points.batches)), rows))
    return points


def _scenario(options: argparse.Namespace) -> dict[str, Any]:
    if not options.scenario:
        raise UserError(f"give --scenario NAME or --suite; known scenarios: {', '.join(built_in())}")
    scenario = read_scenario(options.scenario)
    if options.trace:
        scenario = with_trace(scenario, options.trace, options.rate)
    policies = [check_name(name.strip()) for name in options.policies.split(",")]
    seeds = options.seeds or 3
    tasks = [(scenario, policy, seed) for policy in policies for seed in range(seeds)]
    results: list[Result] = run_all(run_scenario, tasks, options.jobs, scenario.name)
    rows = []
    for policy in policies:
        own = [result for result in results if result.policy == policy]
        means = [sum(metric(result, name) for result in own) / len(own) * by for name, by in COLUMNS.values()]
        rows.append((policy, *means))
    print(f"{scenario.name} (L1, simulated): set-up {scenario.set_up}, mean of {seeds} seeds")
    print(table(("policy", *COLUMNS), rows))
    if options.plot:
        from sglang_nightjar.simulate.plots import plot_timelines

        plot_timelines([result for result in results if result.seed == scenario.seed], options.plot)
    return {"level": "L1", "scenario": scenario, "results": results}


if __name__ == "__main__":
    sys.exit(main())
