"""Time on the emulated device: what is charged, and that the emulation's own time is inside."""

import time

import pytest

from sglang_nightjar import controller
from sglang_nightjar.config import NightjarConfig
from sglang_nightjar.controller_start import start_controller
from sglang_nightjar.emulate.agreement import Agreement
from sglang_nightjar.emulate.device import EmulatedDevice, Work
from sglang_nightjar.simulate.acceptance import AcceptanceSpec
from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.setups import SET_UPS

SET_UP = SET_UPS["4090-r1-qwen-7b"]


class Wall:
    """A clock that moves when slept on, and a little with every look."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


def device(wall: Wall, speed: float = 1.0) -> EmulatedDevice:
    return EmulatedDevice(SET_UP, speed, Agreement(AcceptanceSpec()), wall.clock, wall.sleep)


@pytest.mark.parametrize("speed", [0.1, 1.0, 20.0])
@pytest.mark.parametrize(("tokens", "kv_tokens"), [(1, 300), (64, 20_000), (384, 20_000), (8192, 8192)])
def test_a_forward_takes_what_the_roofline_says(tokens: int, kv_tokens: int, speed: float) -> None:
    cost = StepCost(SET_UP)
    for work, expected in (
        (Work.TARGET, cost.verify_s(tokens, kv_tokens)),
        (Work.DRAFT, cost.draft_s(tokens, 1, kv_tokens)),
    ):
        wall = Wall()
        own = device(wall, speed)
        began = own.clock()
        wall.now += 2e-6  # the emulation's own computing
        if work is Work.TARGET:
            own.target_forward(began, tokens, kv_tokens, 1, prompts=False)
        else:
            own.draft_forward(began, tokens, kv_tokens, 1)
        assert wall.now - began == pytest.approx(expected / speed, abs=5e-6)
        account = own.report()["work"][work.value]
        assert account == {"count": 1, "seconds": expected, "late_seconds": 0.0}


def test_what_comes_late_is_counted() -> None:
    wall = Wall()
    own = device(wall)
    began = own.clock()
    wall.now += 0.5
    own.finish(Work.TARGET, began, 0.2)
    assert not wall.slept and own.report()["work"]["target"]["late_seconds"] == pytest.approx(0.3, abs=1e-4)


def test_background_work_sleeps_and_never_spins() -> None:
    wall = Wall()
    own = device(wall, speed=2.0)
    own.background(Work.RELOAD, 0.4)
    assert wall.slept == [0.2] and own.report()["work"]["reload"]["seconds"] == 0.4


def test_emulated_time_runs_at_the_speed_from_the_first_forward() -> None:
    wall = Wall()
    own = device(wall, speed=10.0)
    wall.now += 50.0
    assert own.now_s() == 0.0
    own.target_forward(own.clock(), 1, 10, 1, prompts=False)
    assert own.now_s() == pytest.approx(own.cost.verify_s(1, 10), abs=1e-3)
    wall.now += 3.0
    assert own.now_s() == pytest.approx(30.0 + own.cost.verify_s(1, 10), abs=1e-3)


def test_two_gpus_cost_what_two_gpus_cost() -> None:
    """One process stands for both: their summed bandwidth, with the all-reduces."""
    pair = SET_UPS["2xl20-qwen-32b"]
    wall = Wall()
    own = EmulatedDevice(pair, 1.0, Agreement(AcceptanceSpec()), wall.clock, wall.sleep)
    began = own.clock()
    own.target_forward(began, 16, 8000, 16, prompts=False)
    assert wall.now - began == pytest.approx(StepCost(pair).verify_s(16, 8000), abs=5e-6)


def test_the_controller_s_seconds_are_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_current", None)
    own = start_controller(NightjarConfig(emulate=SET_UP.name, emulate_speed=50.0), rank=0, max_gamma=5)
    first, before, second = time.monotonic(), own.clock(), time.monotonic()
    time.sleep(0.02)
    third, after, fourth = time.monotonic(), own.clock(), time.monotonic()
    assert 0.99 * 50.0 * (third - second) <= after - before <= 1.01 * 50.0 * (fourth - first)
    assert own.speed == 50.0
    assert start_controller(NightjarConfig(), rank=0, max_gamma=5).clock() == pytest.approx(time.monotonic(), abs=1.0)
