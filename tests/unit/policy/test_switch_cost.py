"""The cost of bringing the draft up to date."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_nightjar.policy.switch_cost import SwitchCost

LAGS, BATCHES = (16, 64, 256, 1024), (1, 4, 16, 64)


def bent(lag: float, batch: int) -> float:
    """A cost that is no line over the tokens: 2 ms, and the square root of the work."""
    return 2e-3 + 4e-4 * (lag * batch) ** 0.5


def table() -> list[tuple[int, int, float]]:
    return [(lag, batch, bent(lag, batch)) for lag in LAGS for batch in BATCHES]


def test_before_any_measurement_it_gives_the_papers_two_figures() -> None:
    cost = SwitchCost()
    assert cost(128, 32) == pytest.approx(17.87e-3, rel=0.005)
    assert cost(512, 64) == pytest.approx(102.03e-3, rel=0.005)


@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(1, 512), st.floats(1e-6, 60.0)), max_size=30),
    st.floats(0.01, 1e6),
    st.integers(1, 4096),
)
def test_a_lag_is_never_free(measured: list[tuple[int, int, float]], lag: float, batch: int) -> None:
    assert 0.0 < SwitchCost(measured)(lag, batch) < float("inf")


def test_no_lag_costs_nothing() -> None:
    assert SwitchCost(table())(0, 32) == 0.0
    assert SwitchCost(table())(100, 0) == 0.0


def test_it_gives_back_what_was_measured_once() -> None:
    cost = SwitchCost(table())
    for lag, batch, seconds in table():
        assert cost(lag, batch) == pytest.approx(seconds, rel=0.01)


def test_it_interpolates_between_measured_cells() -> None:
    # Cells of every power of two, so that a query has its four neighbours.
    measured = [(1 << x, 1 << y, bent(1 << x, 1 << y)) for x in range(4, 11) for y in range(7)]
    cost = SwitchCost(measured)
    for lag, batch in ((24, 3), (96, 6), (200, 24), (700, 48), (1000, 1)):
        assert cost(lag, batch) == pytest.approx(bent(lag, batch), rel=0.1)
        below, above = 1 << (lag.bit_length() - 1), 1 << lag.bit_length()
        assert cost(below, batch) < cost(lag, batch) < cost(above, batch)


def test_it_extrapolates_in_proportion_to_the_work() -> None:
    cost = SwitchCost([(lag, batch, 1e-3 + 9e-6 * lag * batch) for lag, batch, _ in table()] * 5)
    assert cost(16 * 1024, 64) == pytest.approx(1e-3 + 9e-6 * 16 * 1024 * 64, rel=0.1)
    assert cost(32 * 1024, 64) / cost(16 * 1024, 64) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(("rounds", "lag", "batch"), [(1, 64, 16), (20, 4096, 128)])
def test_it_follows_what_catching_up_costs_now(rounds: int, lag: int, batch: int) -> None:
    # Where little was measured; and, after many old measurements, where nothing ever was.
    cost, fresh = SwitchCost(table() * rounds), SwitchCost()
    draw = random.Random(5)
    before = cost(lag, batch)
    for _ in range(300):
        measured = draw.randint(8, 500), draw.randint(1, 64)
        for one in (cost, fresh):
            one.observe(*measured, 3.0 * bent(*measured))
    assert cost(lag, batch) > 2.0 * before
    assert cost(lag, batch) == pytest.approx(fresh(lag, batch), rel=0.15)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lag", "batch", "seconds"])
def test_rejects_what_cannot_be_and_stays_as_it_was(name: str, bad: float) -> None:
    cost = SwitchCost(table())
    before = cost.snapshot()
    with pytest.raises(ValueError, match=f"switch cost {name} is {bad}"):
        cost.observe(**{"lag": 10, "batch": 2, "seconds": 0.01, name: bad})  # type: ignore[arg-type]
    assert cost.snapshot() == before


def test_a_snapshot_costs_the_same_and_learns_the_same() -> None:
    cost, restored = SwitchCost(table()), SwitchCost()
    restored.restore(json.loads(json.dumps(cost.snapshot())))
    for lag, batch, seconds in table():
        assert restored(lag * 1.5, batch + 1) == cost(lag * 1.5, batch + 1)
        cost.observe(lag + 3, batch, seconds)
        restored.observe(lag + 3, batch, seconds)
    assert restored.snapshot() == cost.snapshot()
