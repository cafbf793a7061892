"""Makes the controller of a rank from the server's configuration: its planner, its journal, its channel."""

import time
from collections.abc import Callable

from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.controller import Controller, make_current
from sglang_nightjar.coordination.agent import Agent
from sglang_nightjar.coordination.coordinator import Coordinator
from sglang_nightjar.coordination.transport import NoTransport, ZmqTransport, endpoint_in, run_folder
from sglang_nightjar.observe.journal import Journal
from sglang_nightjar.policy.planner import Planner
from sglang_nightjar.policy.registry import FIRST_GAMMA, PolicyOptions, make_policy


def start_controller(config: NightjarConfig, *, rank: int, max_gamma: int, ranks: int = 1) -> Controller:
    """Makes the controller of this rank, which is the one of this process from now on.

    Args:
        max_gamma: the largest gamma the server has buffers for, at most `config.max_gamma`.
        ranks: of the server; several talk over ZMQ in the private folder the launcher has made.
    """
    spec = config.policy_spec()
    slo_s = config.tpot_slo_ms / 1e3 if config.tpot_slo_ms > 0 else None
    speed = config.emulate_speed if config.emulate else 1.0

    def clock() -> float:
        return time.monotonic() * speed

    planner = None
    if rank == 0:
        planner = Planner(make_policy(spec, PolicyOptions(max_gamma, config.seed, slo_s)))
    own = Controller(
        planner=planner,
        max_gamma=max_gamma,
        constant=spec.gamma if spec.fixed else None,
        initial_gamma=spec.gamma if spec.fixed else min(FIRST_GAMMA, max_gamma),
        catchup_budget_s=config.catchup_budget_ms / 1e3,
        journal=Journal(config.journal_path, rank) if config.journal else None,
        clock=clock,
        speed=speed,
        channel=_open_channel(rank, ranks, clock),
    )
    make_current(own)
    return own


def _open_channel(rank: int, ranks: int, clock: Callable[[], float]) -> Coordinator | Agent:
    if ranks == 1:
        return Coordinator(NoTransport(), 1, clock)
    transport = ZmqTransport(endpoint_in(run_folder()), rank)
    if rank == 0:
        return Coordinator(transport, ranks, clock)
    return Agent(transport, rank, lambda asked: "the memory of this rank is not elastic")
