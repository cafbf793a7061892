"""A scenario: a set-up, its traffic and its acceptance, as a JSON file; and running it under a planner."""

from pathlib import Path
from typing import Any

import msgspec

from sglang_nightjar.errors import UserError
from sglang_nightjar.simulate.acceptance import AcceptanceSpec
from sglang_nightjar.simulate.fields import Count, NotNegative, Positive, decode_json, read_bytes
from sglang_nightjar.simulate.measured import read_measured
from sglang_nightjar.simulate.metrics import Metrics, Slo, summarize, timeline
from sglang_nightjar.simulate.planners import Context, make_planner, starts_without_draft
from sglang_nightjar.simulate.protocols import Cost, ServerOptions
from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.server import Server
from sglang_nightjar.simulate.setups import find_set_up
from sglang_nightjar.simulate.workload import Arrivals, Lengths, Named, Trace, draw_work

_BUILT_IN = Path(__file__).parent / "scenarios"


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:

    set_up: one of `setups.SET_UPS`, or a file of measured points (ends in `.json`; see `measured`).
    arrivals, lengths, acceptance, server, slo: see those classes.
    duration_s: requests come for this long. warmup_s: of it, left out of the figures.
    requests: most requests of a run. seed: of the first run; the others count on from it.
    folder: where relative file names begin (set to the scenario file's own folder on reading).
    """

    name: str
    set_up: str
    arrivals: Arrivals
    lengths: Lengths = Named("sharegpt")
    acceptance: AcceptanceSpec = AcceptanceSpec()
    server: ServerOptions = ServerOptions()
    slo: Slo = Slo()
    duration_s: Positive = 120.0
    warmup_s: NotNegative = 0.0
    requests: Count = 50_000
    seed: int = 0
    note: str = ""
    folder: str = "."


class Result(msgspec.Struct, frozen=True):
    """One run of one policy."""

    scenario: str
    policy: str
    seed: int
    metrics: Metrics
    timeline: dict[str, list[float]]


def built_in() -> list[str]:
    """Names of the scenarios that come with the package."""
    return sorted(path.stem for path in _BUILT_IN.glob("*.json"))


def read_scenario(name: str) -> Scenario:
    """A built-in scenario by name, or a file by path; `UserError` names the field that is wrong."""
    path = _BUILT_IN / f"{name}.json"
    if not path.is_file():
        path = Path(name)
        if not path.is_file():
            raise UserError(f"no scenario is called {name!r}, and no such file: known ones: {', '.join(built_in())}")
    scenario = decode_json(read_bytes(path, "scenario"), Scenario, str(path))
    if scenario.folder == ".":
        scenario = msgspec.structs.replace(scenario, folder=str(path.parent))
    check(scenario, str(path))
    return scenario


def check(scenario: Scenario, source: str) -> None:
    """Raises `UserError` for values that are right by themselves and wrong together."""

    def refuse(field: str, why: str) -> None:
        raise UserError(f"{source}: field {field}: {why}")

    if scenario.warmup_s >= scenario.duration_s:
        refuse("warmup_s", f"{scenario.warmup_s} s leaves nothing of duration_s, {scenario.duration_s} s")
    times = [point.at_s for point in scenario.acceptance.drift]
    if times != sorted(times):
        refuse("acceptance.drift", "points must be in the order of at_s")
    if not scenario.acceptance.domains:
        refuse("acceptance.domains", "at least one domain is needed")
    try:
        make_cost(scenario)
        draw_work(scenario.arrivals, scenario.lengths, 1.0, 1, 0, Path(scenario.folder))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def with_trace(scenario: Scenario, path: str, rate: float | None = None) -> Scenario:
    """The scenario with the arrivals and lengths of the trace at `path`, at mean `rate` where given."""
    arrivals = scenario.arrivals
    trace = arrivals if isinstance(arrivals, Trace) else Trace("")
    trace = msgspec.structs.replace(trace, file=str(Path(path).resolve()), rate=rate or trace.rate)
    return msgspec.structs.replace(scenario, arrivals=trace)


def make_cost(scenario: Scenario) -> Cost:
    """Step times of the scenario's set-up."""
    if scenario.set_up.endswith(".json"):
        return read_measured(Path(scenario.folder) / scenario.set_up)
    return StepCost(find_set_up(scenario.set_up))


def run_scenario(scenario: Scenario, policy: str, seed: int) -> Result:
    """One run; the requests, their acceptance and the noise depend on `seed` alone, whatever the policy."""
    cost = make_cost(scenario)
    seed += scenario.seed
    work = draw_work(
        scenario.arrivals, scenario.lengths, scenario.duration_s, scenario.requests, seed, Path(scenario.folder)
    )
    if not len(work.prompt):
        raise UserError(f"scenario {scenario.name}: no request arrives within {scenario.duration_s} s")
    context = Context(cost.max_gamma, seed, cost, scenario.acceptance, float(work.output.mean()))
    options = scenario.server
    if starts_without_draft(policy):
        options = msgspec.structs.replace(options, start_evicted=True)
    server = Server(
        cost,
        work,
        make_planner(policy, context),
        scenario.acceptance,
        options,
        seed,
        warmup_s=scenario.warmup_s,
        stop_s=scenario.duration_s,
    )
    record = server.run()
    return Result(scenario.name, policy, seed, summarize(record, scenario.slo), timeline(record))


def metric(result: Result, name: str) -> float:
    """A figure by its dotted name, such as `e2e.p99`."""
    value: Any = result.metrics
    for part in name.split("."):
        value = getattr(value, part)
    return float(value)
