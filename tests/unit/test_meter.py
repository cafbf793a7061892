"""Each moment belongs to the innermost metered call, and what metering costs can be taken off again."""

import pytest
from meter import CallCost, Meter, call_cost, net


class Clock:
    """Moves only when told; a reading may take time itself."""

    def __init__(self, reading: int = 0) -> None:
        self.now, self.reading = 0, reading

    def __call__(self) -> int:
        self.now += self.reading
        return self.now


def nested(meter: Meter, clock: Clock) -> None:
    """10 outside, then `outer` 100 with two calls of `inner` of 20 each, then 1 outside."""

    def pass_by(ns: int) -> None:
        clock.now += ns

    inner = meter.timed(lambda: pass_by(20), "inner")

    def outer() -> None:
        pass_by(40)
        inner()
        inner()
        pass_by(60)

    pass_by(10)
    meter.timed(outer, "outer")()
    pass_by(1)
    meter.settle()


def test_time_is_the_innermost_owners() -> None:
    clock = Clock()
    meter = Meter(clock)
    nested(meter, clock)
    assert dict(zip(meter.names, meter.spent, strict=True)) == {"rest": 11, "inner": 40, "outer": 100}
    assert sum(meter.spent) == clock.now
    assert dict(zip(meter.names, meter.entered, strict=True)) == {"rest": 0, "inner": 2, "outer": 1}
    assert dict(zip(meter.names, meter.made, strict=True)) == {"rest": 1, "inner": 0, "outer": 2}


def test_what_metering_took_is_taken_off() -> None:
    """A reading of the clock takes 3: the caller's at the begin of a call, the callee's at its end."""
    clock = Clock(reading=3)
    meter = Meter(clock)
    nested(meter, clock)
    bare = net(meter.spent, meter.entered, meter.made, CallCost(inside=3, outside=3))
    assert dict(zip(meter.names, bare, strict=True)) == {"rest": 11 + 3, "inner": 40, "outer": 100}  # 3: `settle`'s


def test_a_call_that_fails_gives_the_clock_back() -> None:
    clock = Clock()
    meter = Meter(clock)

    def fail() -> None:
        clock.now += 5
        raise KeyError("as asked")

    with pytest.raises(KeyError):
        meter.timed(fail, "failing")()
    clock.now += 2
    meter.settle()
    assert meter.spent == [2, 5]


def test_several_functions_of_one_owner() -> None:
    clock = Clock()
    meter = Meter(clock)
    for _ in range(3):
        meter.timed(lambda: setattr(clock, "now", clock.now + 7), "one")()
    assert meter.names == ["rest", "one"] and meter.spent[1] == 21


def test_the_cost_of_a_call() -> None:
    """With a clock whose readings take 3, and nothing else that does."""
    cost = call_cost(calls=10, rounds=3, clock=Clock(reading=3))
    assert cost.inside == pytest.approx(3, abs=0.4) and cost.outside == pytest.approx(3, abs=0.4)
