"""When requests get to the server: as they arrive, with an answer, or a turnaround after it."""

from typing import Any

import numpy as np
import pytest

from sglang_nightjar.policy.base import Decision, Observation, State
from sglang_nightjar.simulate.acceptance import AcceptanceSpec
from sglang_nightjar.simulate.clients import Clients
from sglang_nightjar.simulate.protocols import ServerOptions
from sglang_nightjar.simulate.record import Record
from sglang_nightjar.simulate.server import Server
from sglang_nightjar.simulate.workload import Closed, Fixed, Work, draw_work

INFINITE = float("inf")


def clients(
    *, arrivals: list[float] | None = None, count: int = 5, longest: int = 100, stop_s: float = INFINITE, **closed: Any
) -> tuple[Clients, Record]:
    """Requests of 10 + 5 tokens, but for the second, which has 90 + 5."""
    prompt = np.full(count, 10)
    prompt[1] = 90
    arrival_s = np.full(count, np.nan) if arrivals is None else np.array(arrivals)
    record = Record(Work(arrival_s, prompt, np.full(count, 5), **closed), 0, 0.0, INFINITE)
    return Clients(record.work, longest, stop_s, record), record


def test_an_open_loop_sends_on_time_whatever_is_answered() -> None:
    own, _ = clients(arrivals=[0.0, 1.0, 1.0, 4.0, 9.0])
    assert own.begin() == [] and own.next_s() == 0.0
    assert own.arrived(0.5) == [0] and own.next_s() == 1.0
    assert own.answered(0.7) == []
    assert own.arrived(4.0) == [1, 2, 3] and own.next_s() == 9.0
    assert own.arrived(20.0) == [4] and own.next_s() is None


def test_a_closed_loop_without_turnaround_sends_in_the_moment_of_an_answer() -> None:
    own, record = clients(concurrency=2)
    assert own.begin() == [0, 1] and own.next_s() is None
    assert own.answered(3.0) == [2] and own.arrived(3.0) == []
    assert own.answered(5.0) == [3] and own.answered(6.0) == [4] and own.answered(7.0) == []
    assert record.work.arrival_s.tolist() == [0.0, 0.0, 3.0, 5.0, 6.0]
    assert record.stop_s == 7.0


def test_a_turnaround_later_where_there_is_one() -> None:
    own, record = clients(concurrency=2, turnaround_s=0.25)
    assert own.begin() == [] and own.next_s() == 0.25
    assert own.arrived(0.2) == [] and own.arrived(0.25) == [0, 1]
    assert own.answered(3.0) == [] and own.answered(3.1) == []
    assert own.arrived(3.0) == [] and own.next_s() == 3.25
    assert own.arrived(3.3) == [2] and own.arrived(3.4) == [3] and own.next_s() is None
    assert record.work.arrival_s[2:4].tolist() == [3.0, 3.1], "the way there is in the latency"


def test_what_is_too_long_is_refused_and_the_next_one_sent() -> None:
    own, record = clients(concurrency=2, longest=90)
    assert own.begin() == [0, 2] and record.rejected == 1
    own, record = clients(arrivals=[0.0, 1.0, 2.0, 3.0, 4.0], longest=90)
    assert own.arrived(9.0) == [0, 2, 3, 4] and record.rejected == 1


def test_a_closed_loop_stops_at_its_time() -> None:
    own, record = clients(concurrency=1, stop_s=5.0)
    assert own.begin() == [0] and own.answered(4.9) == [1] and own.answered(5.0) == []
    assert record.stop_s == 5.0


class Plain:
    """Never speculates."""

    def decide(self, state: State) -> Decision:
        return Decision(0)

    def observe(self, seen: Observation) -> None:
        pass

    def reads_prompts(self, state: State) -> bool:
        return False


class SecondsCost:
    """A decode step takes 1 s, a prefill 0.2 s."""

    max_gamma = 0

    def slots(self, resident: bool) -> int:
        return 10_000

    def step_s(self, *_: Any, **__: Any) -> float:
        return 1.0

    def prefill_s(self, *_: Any) -> float:
        return 0.2

    def catchup_s(self, *_: Any) -> float:
        return 0.0

    def relocate_s(self, slots: float) -> float:
        return 0.0

    def reload_s(self) -> float:
        return 0.0


@pytest.mark.parametrize("turnaround_s", [0.0, 0.05])
def test_a_turnaround_costs_a_wait_for_the_others_step(turnaround_s: float) -> None:
    """Two clients whose requests end at different steps: while one is away, the other goes on decoding."""
    closed = Closed(2, turnaround_s)
    work = draw_work(closed, Fixed(20, 10), 60.0, 6, 0)
    work.output[0] = 4  # the first client is a few steps ahead of the second from then on
    server = Server(SecondsCost(), work, Plain(), AcceptanceSpec(), ServerOptions(time_noise=0.0), 0)
    record = server.run()
    ttft = (record.first_s - record.work.arrival_s)[2:4]
    assert ttft == pytest.approx(0.2 if turnaround_s == 0.0 else 1.0 + 0.2)


def test_alone_a_client_waits_for_nothing_but_its_turnaround() -> None:
    work = draw_work(Closed(1, 0.05), Fixed(20, 4), 60.0, 3, 0)
    record = Server(SecondsCost(), work, Plain(), AcceptanceSpec(), ServerOptions(time_noise=0.0), 0).run()
    assert record.end_s == pytest.approx(3 * (0.05 + 0.2 + 3.0))
    assert record.first_s - record.work.arrival_s == pytest.approx(np.full(3, 0.25))
