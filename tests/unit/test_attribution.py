"""Every outcome lands on the step that earned it, with that step's own time.

`Loop` makes the calls of SGLang's `event_loop_normal` or `event_loop_overlap`, in their order, over a clock of its own:
1,000 steps whose gamma changes at random, prefills between them (two in a row do not overlap), idle times, and
moves, before which the step under way is finished.
"""

import random
from collections import deque
from typing import NamedTuple

import pytest

from sglang_nightjar.attribution import ArrivalClock, InFlight, StepClock, SynchronousClock
from sglang_nightjar.observe.counters import StepFacts

STEPS = 1000
IDLE_S = 5.0
FORWARD_S = [0.020 + 0.011 * gamma for gamma in range(6)]
PREFILL_S = 0.037


class Launch(NamedTuple):
    """What really was launched. `gamma`: None for a prefill. `seconds`: its own, its outcome's processing left out."""

    number: int
    gamma: int | None
    seconds: float
    done_s: float


class Landed(NamedTuple):
    """What an outcome was taken for, and what it was. `in_force`: gamma of the latest launch at that moment."""

    number: int
    gamma: int
    seconds: float
    truth: Launch
    true_seconds: float
    in_force: int


class Loop:
    """`device`: works on while the scheduler goes on, as a GPU does; else a launch returns when its step is done."""

    def __init__(self, seed: int, clock: StepClock, *, overlap: bool, device: bool = False) -> None:
        self.rng = random.Random(seed)
        self.flight = InFlight(clock)
        self.overlap, self.device = overlap, device
        self.now_s, self.free_s = 1000.0, 0.0  # `free_s`: when the device is done with all it has
        self.queue: deque[Launch] = deque()
        self.landed: list[Landed] = []
        self.uncounted: list[tuple[int, int]] = []  # at each decode step's scheduling: what was said, and what is true
        self.in_force = 0

    def run(self) -> list[Landed]:
        prefilled = False
        for number in range(1, STEPS + 1):
            idle = number == 1 or self.rng.random() < 0.05
            if idle:
                self.process_all_but(0)
                self.now_s += IDLE_S
            elif self.rng.random() < 0.05:
                self.process_all_but(0)
            gamma = None if self.rng.random() < 0.15 else self.rng.randrange(6)
            scheduling_s = self.spend(0.0001, 0.002)
            if gamma is not None:
                truth = sum(launch.gamma + 1 for launch in self.queue if launch.gamma is not None)
                self.uncounted.append((self.flight.uncounted, truth))
            elif prefilled:
                self.process_all_but(0)
            self.launch(number, gamma, 0.0 if idle else scheduling_s, after_idle=idle)
            self.process_all_but(1 if self.overlap else 0)
            prefilled = gamma is None
        self.process_all_but(0)
        return self.landed

    def spend(self, least_s: float, most_s: float) -> float:
        spent = self.rng.uniform(least_s, most_s)
        self.now_s += spent
        return spent

    def launch(self, number: int, gamma: int | None, scheduling_s: float, *, after_idle: bool) -> None:
        began_s, before_s = self.now_s, self.free_s
        forward_s = PREFILL_S if gamma is None else FORWARD_S[gamma] * self.rng.uniform(0.9, 1.1)
        self.free_s = max(before_s, began_s) + forward_s
        self.now_s = began_s + 0.0005 if self.device else self.free_s
        own_s = scheduling_s + forward_s
        if self.device:
            own_s = self.free_s - (began_s if after_idle else before_s)
        self.in_force = 0 if gamma is None else gamma
        self.flight.launch(
            number,
            directive=7 * number,
            gamma=self.in_force,
            facts=None if gamma is None else StepFacts(gamma, drafted=number),
            draft_forwards=3 * number,
            began_s=began_s,
            ended_s=self.now_s,
            after_idle=after_idle,
        )
        self.queue.append(Launch(number, gamma, own_s, self.free_s))

    def process_all_but(self, kept: int) -> None:
        while len(self.queue) > kept:
            truth = self.queue.popleft()
            began_s = self.now_s
            self.now_s = max(self.now_s, truth.done_s)
            spent = self.spend(0.0001, 0.003)
            step, seconds = self.flight.land(truth.number, began_s, self.now_s)
            assert (step.directive, step.draft_forwards) == (7 * step.number, 3 * step.number)
            assert (step.facts is None) == (truth.gamma is None)
            assert step.facts is None or (step.facts.gamma, step.facts.drafted) == (truth.gamma, truth.number)
            own_s = truth.seconds if self.device else truth.seconds + spent
            self.landed.append(Landed(step.number, step.gamma, seconds, truth, own_s, self.in_force))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_cpu_step_is_charged_its_own_time(overlap: bool, seed: int) -> None:
    landed = Loop(seed, SynchronousClock(), overlap=overlap).run()
    assert [each.number for each in landed] == list(range(1, STEPS + 1))
    for each in landed:
        assert (each.number, each.gamma) == (each.truth.number, each.truth.gamma or 0)
        assert each.seconds == pytest.approx(each.true_seconds, abs=1e-9), each


def test_what_is_in_force_when_an_outcome_arrives_is_another_steps() -> None:
    """So the tests above would fail if outcomes were credited to it."""
    landed = Loop(0, SynchronousClock(), overlap=True).run()
    assert sum(each.in_force != (each.truth.gamma or 0) for each in landed) > STEPS / 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gpu_step_took_the_time_since_the_outcome_before(overlap: bool) -> None:
    """The device is the slower of the two, so outcomes arrive as it makes steps; processing one takes up to 3 ms."""
    landed = Loop(3, ArrivalClock(), overlap=overlap, device=True).run()
    for each in landed:
        assert (each.number, each.gamma) == (each.truth.number, each.truth.gamma or 0)
        assert each.seconds == pytest.approx(each.true_seconds, abs=0.004), each


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_request_may_have_committed_meanwhile(overlap: bool) -> None:
    """A step in flight may have committed as many tokens as its gamma and one; without overlap none is in flight."""
    loop = Loop(4, SynchronousClock(), overlap=overlap)
    loop.run()
    assert all(said == truth for said, truth in loop.uncounted)
    assert {said for said, _ in loop.uncounted} == (set(range(7)) if overlap else {0})


def test_between_idle_times_all_time_is_charged_once() -> None:
    clock = SynchronousClock()
    first = clock.launched(10.0, 11.0, after_idle=True)
    second = clock.launched(11.5, 13.0, after_idle=False)
    charged = clock.landed(first, 13.25, 13.5)
    third = clock.launched(13.75, 14.0, after_idle=False)
    charged += clock.landed(second, 14.0, 15.0) + clock.landed(third, 15.0, 16.0)
    assert charged == 6.0
    assert clock.landed(clock.launched(50.0, 50.5, after_idle=True), 50.5, 51.0) == 1.0


def test_an_outcome_nobody_awaits() -> None:
    flight = InFlight(SynchronousClock())
    with pytest.raises(AssertionError, match="outcome of step 4 has arrived, and none is awaited"):
        flight.land(4, 1.0, 2.0)
    flight.launch(3, directive=1, gamma=2, facts=None, draft_forwards=0, began_s=0.0, ended_s=1.0, after_idle=True)
    with pytest.raises(AssertionError, match="outcome of step 4 has arrived, and that of 3 is awaited"):
        flight.land(4, 1.0, 2.0)
