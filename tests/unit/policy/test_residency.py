"""When the draft leaves and when it comes back."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.policy.base import Move, Residency, State
from sglang_nightjar.policy.residency import ResidencyCosts, ResidencyPlanner, ResidencySettings

COSTS = ResidencyCosts(slots_resident=10_000, slots_evicted=15_000, pause_s=0.05, reload_s=0.5)
PERSIST = 5
SETTINGS = ResidencySettings(persist=PERSIST)
SHORT = State(100.0, 60, 9_500, free_slots=500, total_slots=10_000, queue_length=30)
ROOMY = State(
    100.0, 8, 4_000, free_slots=11_000, total_slots=15_000, max_lag=500, residency=Residency.EVICTED
)  # 4000 used, of 10000 in the smaller pool


class Told:
    """Estimates as told: `gain` in tokens/s, plain decoding at `each` tokens/s per request up to `most`."""

    def __init__(self, gain: float, each: float = 40.0, most: float = 1e9, catchup_s: float = 0.1) -> None:
        self.gain_s, self.each, self.most, self.catchup = gain, each, most, catchup_s

    def gain(self, state: State) -> float:
        return self.gain_s

    def plain_rate(self, batch_size: int, kv_tokens: int) -> float:
        return min(self.each * batch_size, self.most)

    def larger_rate(self, requests: int, state: State) -> float:
        return self.plain_rate(requests, 0)

    def catchup_s(self, lag: int, batch_size: int) -> float:
        return self.catchup


def planner(gain: float, options: ResidencySettings = SETTINGS, **told: float) -> ResidencyPlanner:
    return ResidencyPlanner(Told(gain, **told), COSTS, options)


def ask(residency: ResidencyPlanner, moments: Iterable[State]) -> list[Move]:
    return [residency.decide(state) for state in moments]


def held(state: State, steps: int, every_s: float = 0.03) -> list[State]:
    return [replace(state, now_s=state.now_s + every_s * step) for step in range(steps)]


def test_evicts_when_off_worthless_and_short_for_long_enough() -> None:
    assert ask(planner(-5.0), held(SHORT, PERSIST)) == [Move.STAY] * (PERSIST - 1) + [Move.EVICT]


@pytest.mark.parametrize(
    ("state", "gain"),
    [
        (SHORT, 700.0),  # 3100 tokens/s now, 3600 of a larger batch: not a quarter more
        (replace(SHORT, free_slots=1_000), -5.0),  # 10 % free is not short
        (replace(SHORT, total_slots=0, free_slots=0), -5.0),  # no pool known
    ],
)
def test_each_condition_is_needed(state: State, gain: float) -> None:
    assert set(ask(planner(gain), held(state, 20 * PERSIST))) == {Move.STAY}


def test_evicts_where_speculation_pays_but_a_larger_batch_would_pay_much_more() -> None:
    residency = planner(400.0)
    assert Move.EVICT in ask(residency, held(SHORT, PERSIST))
    assert residency.benefit_tokens == pytest.approx((3600 - 2800) * 15 - 2800 * 0.1)


def test_a_blocked_queue_is_short_whatever_is_free() -> None:
    blocked = replace(SHORT, free_slots=9_000, queue_blocked=True)
    assert ask(planner(-5.0), held(blocked, PERSIST))[-1] is Move.EVICT


def test_one_decision_without_the_condition_starts_the_count_again() -> None:
    residency = planner(-5.0)
    moments = held(SHORT, 2 * PERSIST - 1)
    moments[PERSIST - 1] = replace(moments[PERSIST - 1], free_slots=5_000)
    assert set(ask(residency, moments)) == {Move.STAY}
    assert ask(residency, [replace(SHORT, now_s=101.0)]) == [Move.EVICT]


def test_the_benefit_of_an_eviction_is_what_more_requests_bring_less_two_pauses() -> None:
    residency = planner(-5.0)
    ask(residency, held(SHORT, PERSIST))
    # 60 requests become 90 (half more slots, 30 waiting): 1200 tokens/s for 15 s; two pauses of 0.05 s at 2400.
    assert residency.benefit_tokens == pytest.approx(1200 * 15 - 2400 * 0.1)
    few = planner(-5.0)
    ask(few, held(replace(SHORT, queue_length=3), PERSIST))
    assert few.benefit_tokens == pytest.approx(120 * 15 - 2400 * 0.1)


def test_no_eviction_where_more_requests_bring_nothing() -> None:
    residency = planner(-5.0, most=2400.0)
    assert set(ask(residency, held(SHORT, 20 * PERSIST))) == {Move.STAY}
    assert residency.benefit_tokens == 0.0


def test_reloads_when_there_is_room_and_it_would_pay() -> None:
    residency = planner(100.0)
    assert ask(residency, held(ROOMY, PERSIST)) == [Move.STAY] * (PERSIST - 1) + [Move.RELOAD]
    # 100 tokens/s for 15 s less half a second; a pause and a catch-up, 0.15 s, at 320 tokens/s.
    assert residency.benefit_tokens == pytest.approx(100 * 14.5 - 320 * 0.15)


@pytest.mark.parametrize(
    ("state", "gain", "catchup_s"),
    [
        (replace(ROOMY, queue_length=1), 100.0, 0.1),
        (replace(ROOMY, free_slots=15_000 - 8_001), 100.0, 0.1),  # must leave 20 % of 10,000 free
        (ROOMY, -1.0, 0.1),
        (ROOMY, 0.0, 0.1),
        (ROOMY, 100.0, 5.0),  # the catch-up costs more than it brings
        (replace(ROOMY, residency=Residency.RELOADING), 100.0, 0.1),
        (replace(ROOMY, residency=Residency.EVICTING), 100.0, 0.1),
    ],
)
def test_each_condition_of_a_reload_is_needed(state: State, gain: float, catchup_s: float) -> None:
    residency = planner(gain, catchup_s=catchup_s)
    assert set(ask(residency, held(state, 20 * PERSIST))) == {Move.STAY}
    assert residency.benefit_tokens == 0.0


def test_a_pool_just_roomy_enough_reloads() -> None:
    assert Move.RELOAD in ask(planner(100.0), held(replace(ROOMY, free_slots=15_000 - 8_000), PERSIST))


def test_a_second_eviction_waits_for_the_cooldown() -> None:
    residency = planner(-5.0)
    # As if every eviction were undone at once.
    moved = [state.now_s for state in held(SHORT, 4000) if residency.decide(state) is Move.EVICT]
    assert len(moved) == 4  # 120 s
    assert all(30.0 <= later - earlier < 31.0 for earlier, later in zip(moved, moved[1:], strict=False))


def test_a_reload_waits_until_the_eviction_has_settled() -> None:
    estimates = Told(-5.0)
    residency = ResidencyPlanner(estimates, COSTS, SETTINGS)
    evicted_s = SHORT.now_s + 0.03 * (PERSIST - 1)
    assert ask(residency, held(SHORT, PERSIST))[-1] is Move.EVICT
    estimates.gain_s = 100.0
    after = [replace(ROOMY, now_s=evicted_s + 0.1 * step) for step in range(1, 100)]
    moved = [state.now_s for state in after if residency.decide(state) is Move.RELOAD]
    assert moved[0] - evicted_s == pytest.approx(5.0, abs=0.11)


RESIDENCIES = st.sampled_from(list(Residency))
MOMENTS = st.lists(
    st.tuples(
        st.floats(0.0, 20.0),  # seconds since the last
        st.integers(1, 256),
        st.integers(0, 15_000),  # free slots
        st.integers(0, 40),
        st.booleans(),
        RESIDENCIES,
        st.floats(-1e3, 1e3),  # gain
        st.integers(1, 6),  # decisions it lasts
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(MOMENTS, st.integers(1, 4))
def test_moves_are_possible_paid_and_apart(moments: list[tuple[Any, ...]], persist: int) -> None:
    estimates = Told(0.0)
    options = ResidencySettings(persist=persist)
    residency = ResidencyPlanner(estimates, COSTS, options)
    now_s = 0.0
    moved: list[tuple[float, Move]] = []
    for wait_s, batch_size, free, queue, blocked, where, gain, lasts in moments:
        estimates.gain_s = gain
        for _ in range(lasts):
            now_s += wait_s
            state = State(now_s, batch_size, 100 * batch_size, free, 15_000, queue, blocked, 5, where)
            move = residency.decide(state)
            if move is Move.STAY:
                continue
            assert where is (Residency.RESIDENT if move is Move.EVICT else Residency.EVICTED)
            assert residency.benefit_tokens > 0.0
            assert move is Move.EVICT or gain > 0.0
            assert not moved or now_s - moved[-1][0] >= options.settle_s
            evictions = [at for at, earlier in moved if earlier is Move.EVICT]
            assert move is Move.RELOAD or not evictions or now_s - evictions[-1] >= options.cooldown_s
            moved.append((now_s, move))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tau_low": 0.0}, "tau_low"),
        ({"tau_low": 0.3}, "tau_low"),  # above the margin
        ({"tau_low": float("nan")}, "tau_low"),
        ({"margin": 1.0}, "margin"),
        ({"persist": 0}, "persist"),
        ({"cooldown_s": -1.0}, "cooldown_s"),
        ({"settle_s": -1.0}, "settle_s"),
        ({"horizon_s": float("nan")}, "horizon_s"),
    ],
)
def test_settings_that_cannot_be_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ResidencySettings(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"slots_resident": 0}, "slots_resident"),
        ({"slots_evicted": 9_999}, "slots_evicted"),
        ({"pause_s": -0.1}, "pause_s"),
        ({"reload_s": float("nan")}, "reload_s"),
    ],
)
def test_costs_that_cannot_be_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(COSTS, **fields)


@pytest.mark.parametrize("before", [0, 3, PERSIST, 40])
def test_a_snapshot_goes_on_where_it_was_taken(before: int) -> None:
    residency, restored = planner(-5.0), planner(-5.0)
    moments = held(SHORT, before + 2000)
    ask(residency, moments[:before])
    restored.restore(json.loads(json.dumps(residency.snapshot())))
    assert restored.benefit_tokens == residency.benefit_tokens
    moves = ask(residency, moments[before:])
    assert ask(restored, moments[before:]) == moves
    assert Move.EVICT in moves
    assert restored.snapshot() == residency.snapshot()
