"""The simulator (L1) on a benchmark's requests: what `simulate/server.py` makes of the same load and policy."""

from dataclasses import replace

from sglang_nightjar.simulate.acceptance import AcceptanceSpec
from sglang_nightjar.simulate.metrics import Metrics, Slo, summarize
from sglang_nightjar.simulate.planners import Context, make_planner, starts_without_draft
from sglang_nightjar.simulate.protocols import Cost, ServerOptions
from sglang_nightjar.simulate.server import Server
from sglang_nightjar.simulate.workload import Work

# A benchmark's name of a policy -> the simulator's, where they differ.
_NAMES = {"off+no-draft": "no-draft", "nightjar+elastic:off": "nightjar-fixed"}


def simulate(
    cost: Cost,
    policy: str,
    work: Work,
    acceptance: AcceptanceSpec,
    slo: Slo,
    *,
    turnaround_s: float = 0.0,
    may_end: bool = False,
) -> Metrics:
    """One run without noise.

    Args:
        policy: as in `bench/serving.py`; `UserError` where the simulator has none of that name.
        may_end: whether requests may end before their length, so that SGLang keeps less room for them.
        turnaround_s: of a closed loop's clients (`simulate/workload.py: Closed`).
    """
    name = _NAMES.get(policy, policy)
    planner = make_planner(name, Context(cost.max_gamma, 0, cost, acceptance, float(work.output.mean())))
    how = ServerOptions(time_noise=0.0, start_evicted=starts_without_draft(name), reserve_output=not may_end)
    own = replace(work, arrival_s=work.arrival_s.copy(), turnaround_s=turnaround_s)
    return summarize(Server(cost, own, planner, acceptance, how, 0).run(), slo)
