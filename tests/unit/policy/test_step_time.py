"""Step times, tried and untried."""

import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.policy.step_time import StepTime
from sglang_nightjar.simulate.roofline import StepCost
from sglang_nightjar.simulate.setups import find_set_up

COST = StepCost(find_set_up("4090-r1-qwen-7b"))
CONTEXT = 400


def truth(gamma: int, batch_size: int) -> float:
    return COST.step_s(batch_size, gamma, float(batch_size * CONTEXT))


def taught(cells: list[tuple[int, int]], steps: int, noise: float = 0.03) -> StepTime:
    """An estimate that has seen each (gamma, batch size) of `cells` `steps` times, in turn."""
    step_time, draw = StepTime(5), random.Random(2)
    for _ in range(steps):
        for gamma, batch_size in cells:
            seconds = truth(gamma, batch_size) * (1.0 + noise * (2.0 * draw.random() - 1.0))
            step_time.observe(gamma, batch_size, batch_size * CONTEXT, seconds)
    return step_time


GRID = [(gamma, batch_size) for gamma in (0, 1, 3, 5) for batch_size in (1, 4, 16, 64, 192)]


@pytest.mark.parametrize(("gamma", "batch_size"), [(2, 8), (4, 1), (2, 32), (0, 96), (3, 128), (4, 192), (2, 100)])
def test_predicts_an_untried_cell_of_a_roofline(gamma: int, batch_size: int) -> None:
    step_time = taught(GRID, 25)
    assert step_time.samples(gamma, batch_size) == 0.0
    predicted = step_time.predict(gamma, batch_size, batch_size * CONTEXT)
    assert predicted == pytest.approx(truth(gamma, batch_size), rel=0.12)


def test_two_arms_tell_the_others_of_one_batch_size() -> None:
    step_time = taught([(0, 16), (3, 16)], 10)
    for gamma in (1, 2, 4, 5):
        assert step_time.predict(gamma, 16, 16 * CONTEXT) == pytest.approx(truth(gamma, 16), rel=0.15)


def test_the_mean_of_the_cell_takes_over() -> None:
    step_time = taught(GRID, 10)
    odd = 1.8 * truth(2, 32)  # a shape for which the kernels are slow: no line knows that
    errors, claimed = [], []
    for _ in range(120):
        errors.append(abs(step_time.predict(2, 32, 32 * CONTEXT) / odd - 1.0))
        claimed.append(step_time.relative_error(2, 32))
        step_time.observe(2, 32, 32 * CONTEXT, odd)
    assert errors[0] > 0.3 and errors[-1] < 0.03
    assert claimed[-1] < 0.5 * claimed[0]
    assert step_time.samples(2, 32) > 100


def test_little_is_claimed_of_batches_far_from_any_seen() -> None:
    step_time = taught([(gamma, 8) for gamma in range(6)], 100)
    assert step_time.relative_error(3, 9) < 0.08
    assert step_time.relative_error(0, 192) > 0.1


def test_little_is_claimed_of_a_side_never_tried_at_such_a_batch() -> None:
    step_time = taught([(0, 1), (5, 1), (5, 4), (5, 16)], 60)
    assert not step_time.tried(0, 16) and step_time.tried(3, 20) and step_time.tried(0, 1)
    errors = [step_time.relative_error(0, batch_size) for batch_size in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors) and errors[0] < 0.1 and errors[-1] > 0.4
    step_time.observe(0, 16, 16 * CONTEXT, truth(0, 16))
    assert step_time.tried(0, 16) and step_time.relative_error(0, 16) < errors[-1] - 0.3


def test_little_is_claimed_of_more_tokens_than_ever_went_through_the_target() -> None:
    step_time = taught([(0, 16), (1, 16), (2, 16)], 60)
    errors = [step_time.relative_error(gamma, 16) for gamma in range(6)]
    assert max(errors[:3]) < 0.03
    assert 0.05 < errors[3] < errors[4] < errors[5] < 0.3
    assert taught([(0, 16), (1, 16), (2, 16), (0, 96)], 60).relative_error(5, 16) < errors[5] - 0.1


def test_a_plain_step_is_no_shorter_than_those_of_batches_half_as_large() -> None:
    step_time = taught([(0, 1), (0, 4), (5, 32)], 30)
    floor = step_time.least_plain(16)
    assert 0.9 * truth(0, 4) < floor <= truth(0, 4)
    assert step_time.least_plain(4) < 1.01 * truth(0, 1), "only of smaller batches"
    assert step_time.least_plain(1) == 0.0
    step_time.observe(0, 4, 4 * CONTEXT, 10.0)  # a hiccup is not the shortest
    assert step_time.least_plain(16) < 1.1 * floor


def test_kv_is_not_blamed_for_what_drafts_take() -> None:
    # KV grows with the batch, as the drafts' time does. Here a token of KV costs nothing.
    def seconds(gamma: int, batch_size: int) -> float:
        verified = 0.0 if gamma == 0 else 0.02 + 0.0013 * batch_size * (gamma + 1)
        return 0.047 + 0.0029 * batch_size * (gamma + 1) + verified + 0.0108 * gamma + 0.0022 * gamma * batch_size

    def for_kv(seed: int) -> float:
        step_time, draw = StepTime(5), random.Random(seed)
        grown = ((1, (0,), 2), (1, (3, 4, 5, 5, 5, 5, 5, 5), 10), (4, (4, 5, 3, 5), 14), (16, (2, 3, 4, 5), 10))
        for batch_size, gammas, times in grown:
            for time in range(times):
                for gamma in gammas:
                    noise = draw.uniform(0.9, 1.1)
                    step_time.observe(
                        gamma, batch_size, batch_size * (30 + 4 * time), seconds(gamma, batch_size) * noise
                    )
        return step_time.predict(0, 16, 1000) - step_time.predict(0, 16, 0)

    assert for_kv(1) < 0.1 * seconds(0, 16)
    assert statistics.median(map(for_kv, range(11))) < 0.25 * seconds(0, 16), "without the pull towards 0, half"


def test_a_cell_follows_when_its_steps_get_slower() -> None:
    step_time = taught([(3, 16)], 400)
    for _ in range(500):
        step_time.observe(3, 16, 16 * CONTEXT, 2.0 * truth(3, 16))
    assert step_time.predict(3, 16, 16 * CONTEXT) == pytest.approx(2.0 * truth(3, 16), rel=0.15)


def test_a_hiccup_moves_little() -> None:
    step_time = taught(GRID, 25)
    cells = [*GRID, (2, 8), (4, 128)]
    before = [step_time.predict(gamma, batch_size, batch_size * CONTEXT) for gamma, batch_size in cells]
    step_time.observe(3, 16, 16 * CONTEXT, 100.0 * truth(3, 16))
    pace = math.exp(step_time.snapshot()["pace"])
    assert 1.0 < pace < 1.04
    for (gamma, batch_size), old in zip(cells, before, strict=True):
        new = step_time.predict(gamma, batch_size, batch_size * CONTEXT)
        limit = 0.08 if (gamma, batch_size) == (3, 16) else 0.01
        assert new / pace == pytest.approx(old, rel=limit)


def test_a_slower_machine_does_not_discredit_the_arm_played_then() -> None:
    step_time = StepTime(5)
    for gamma in (4, 5) * 10:
        step_time.observe(gamma, 1, CONTEXT, truth(gamma, 1))
    for step in range(160):  # the machine slows down by half and recovers, and 5 is played all the while
        step_time.observe(5, 1, CONTEXT, (1.25 - 0.25 * math.cos(step / 80 * math.pi)) * truth(5, 1))
    before, after = (step_time.predict(gamma, 1, CONTEXT) / truth(gamma, 1) for gamma in (4, 5))
    assert after / before == pytest.approx(1.0, abs=0.1)


def test_a_slower_machine_is_slower_at_every_batch() -> None:
    step_time = taught(GRID, 25)
    for _ in range(40):
        step_time.observe(3, 16, 16 * CONTEXT, 1.5 * truth(3, 16))
    for gamma, batch_size in GRID:
        assert step_time.predict(gamma, batch_size, batch_size * CONTEXT) > 1.2 * truth(gamma, batch_size)


STEPS = st.tuples(st.integers(0, 5), st.integers(1, 512), st.integers(0, 10**7), st.floats(1e-6, 3600.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=80))
def test_a_prediction_is_always_a_positive_number(steps: list[tuple[int, int, int, float]]) -> None:
    step_time = StepTime(5)
    for gamma, batch_size, kv_tokens, seconds in steps:
        step_time.observe(gamma, batch_size, kv_tokens, seconds)
    for gamma in range(6):
        for batch_size, kv_tokens in ((1, 0), (7, 3000), (512, 10**7)):
            predicted = step_time.predict(gamma, batch_size, kv_tokens)
            assert math.isfinite(predicted) and predicted > 0.0
            assert math.isfinite(step_time.relative_error(gamma, batch_size))
    assert all(weight >= 0.0 for weight in step_time.snapshot()["weights"])


def test_before_the_first_step_a_draft_costs_something() -> None:
    step_time = StepTime(3)
    predicted = [step_time.predict(gamma, 4, 1000) for gamma in range(4)]
    assert predicted == sorted(predicted) and predicted[0] < predicted[3]


def test_a_snapshot_predicts_and_learns_the_same() -> None:
    step_time, restored = taught(GRID, 7), StepTime(5)
    restored.restore(json.loads(json.dumps(step_time.snapshot())))
    for gamma, batch_size in [*GRID, (2, 8), (4, 32)]:
        for one in (step_time, restored):
            one.observe(gamma, batch_size, 50 * batch_size, truth(gamma, batch_size))
        assert restored.predict(gamma, batch_size, 99) == step_time.predict(gamma, batch_size, 99)
    assert restored.snapshot() == step_time.snapshot()


def test_the_drafts_own_time_tells_it_from_that_of_tokens() -> None:
    # A batch of 17 only, at every gamma: whole steps cannot say whether rows are slow or drafts are.
    def draft_s(gamma: int) -> float:
        return gamma * (0.015 + 17 * 0.002)

    def verify_s(tokens: int) -> float:
        return 0.07 + 0.003 * tokens

    blind, told = StepTime(5), StepTime(5)
    for step in range(300):
        gamma = (0, 5, 3, 4)[step % 4]
        seconds = verify_s(17 * (gamma + 1)) + draft_s(gamma)
        blind.observe(gamma, 17, 17 * CONTEXT, seconds)
        told.observe(gamma, 17, 17 * CONTEXT, seconds, draft_s(gamma))
    true = verify_s(48) - verify_s(17)
    assert told.growth(17, 48, 0) == pytest.approx(true, rel=0.05)
    assert blind.growth(17, 48, 0) > 1.5 * true
    for gamma in (0, 3, 5):
        assert told.predict(gamma, 17, 17 * CONTEXT) == pytest.approx(
            verify_s(17 * (gamma + 1)) + draft_s(gamma), rel=0.05
        )
