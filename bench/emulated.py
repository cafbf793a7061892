"""What a server of `--nightjar-emulate` tells a benchmark: who took its time."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from load import send
from serving import Server

from sglang_nightjar.emulate.set_up import Emulated
from sglang_nightjar.simulate.acceptance import AcceptanceSpec
from sglang_nightjar.simulate.measured import MeasuredCost
from sglang_nightjar.simulate.metrics import Slo
from sglang_nightjar.simulate.protocols import Cost
from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.suite_paper import SET_UPS as ACCEPTANCE
from sglang_nightjar.simulate.suite_paper import slo_of
from sglang_nightjar.simulate.workload import Work

_TRIPS = 16  # requests by which a client's turnaround is measured
DEVICE = ("target", "draft", "relocate")  # work for which the scheduler waits


def state(server: Server) -> dict[str, Any]:
    """The scheduler's part of `/server_info`."""
    found: dict[str, Any] = server.get("/server_info")["internal_states"][0]
    return found


@dataclass(frozen=True)
class Shares:
    """Of a load's time.

    Attributes:
        forwards: of the target.
        device_s: emulated seconds that the device's forwards and relocations took. late_s: those of them by which
            the emulation's own computing was too slow.
    """

    forwards: int
    device_s: float
    late_s: float

    def report(self, seconds: float, speed: float) -> dict[str, float]:
        """Of a load of so many emulated seconds: the device's share, and what else passed per forward, wall ms.

        That is the scheduler's own work where the server is never idle.
        """
        other_s = seconds - self.device_s - self.late_s
        return {
            "device_share": self.device_s / seconds,
            "scheduler_ms": other_s / speed / max(self.forwards, 1) * 1e3,
            "late_ms": self.late_s / speed * 1e3,
        }


def shares(before: dict[str, Any], after: dict[str, Any], speed: float) -> Shares:
    """Between two readings of `state`."""
    work, earlier = after["emulated"]["work"], before["emulated"]["work"]
    spent = {name: work[name]["seconds"] - earlier[name]["seconds"] for name in work}
    late = sum(work[name]["late_seconds"] - earlier[name]["late_seconds"] for name in DEVICE)
    forwards = work["target"]["count"] - earlier["target"]["count"]
    return Shares(forwards, sum(spent[name] for name in DEVICE), late * speed)


def usual_acceptance(name: str) -> str:
    """`--nightjar-emulate-acceptance` for a set-up: what `simulate/suite_paper.py` takes; empty where it has none."""
    return str(ACCEPTANCE.get(name, ""))


def slo(found: Emulated) -> Slo:
    """The set-up's, as in the simulator's suite."""
    return slo_of(found.forwards.cost)


def read(text: str) -> AcceptanceSpec:
    """`--nightjar-emulate-acceptance`, as the server reads it."""
    from sglang_nightjar.emulate.agreement import read_acceptance

    return read_acceptance(text)


def turnaround_s(server: Server, speed: float) -> float:
    """Emulated s that an answer's way to its client and the next request's way to the scheduler take together.

    Of requests for one token, one after the other on an idle server: what of each the device did not take.
    """
    work = Work(np.full(_TRIPS, np.nan), np.full(_TRIPS, 40), np.ones(_TRIPS, np.int64), 1)
    before = state(server)
    record, _ = send(server.url, work, speed=speed, seed=1)
    device_s = shares(before, state(server), speed).device_s
    return max(float(np.median(record.finish_s - record.work.arrival_s)) - device_s / _TRIPS, 0.0)


def with_scheduler(found: Emulated, own_s: float) -> Cost:
    """What is emulated, with a scheduler that takes `own_s` emulated s per step. A measured set-up has one of its own
    already, and the emulator's comes on top."""
    cost = found.forwards.cost
    if isinstance(cost, StepCost):
        device = replace(found.set_up.device, step_overhead_s=own_s, speculation_overhead_s=0.0)
        return StepCost(replace(found.set_up, device=device))
    points = cost.points
    rows = tuple(tuple(seconds + own_s for seconds in row) for row in points.seconds)
    return MeasuredCost(msgspec.structs.replace(points, seconds=rows, prefill_step_s=points.prefill_step_s + own_s))
