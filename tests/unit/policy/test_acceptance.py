"""What verifications teach about acceptance."""

import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from baseline_world import observation
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_nightjar.policy.acceptance import Acceptance, drafting_requests


def draws(chances: Sequence[float], batch_size: int, steps: int, seed: int = 1) -> Iterator[tuple[int, ...]]:
    """Histograms of `batch_size` requests whose position i is accepted with probability `chances[i]`."""
    reach = np.cumprod([1.0, *chances])
    ends = np.append(reach[:-1] - reach[1:], reach[-1])
    for row in np.random.default_rng(seed).multinomial(batch_size, ends, steps).tolist():
        yield tuple(row)


def teach(acceptance: Acceptance, chances: Sequence[float], batch_size: int, steps: int, seed: int = 1) -> list[int]:
    """Steps at which a change was reported."""
    rows = draws(chances, batch_size, steps, seed)
    return [step for step, row in enumerate(rows) if acceptance.observe(len(chances), row)]


def true_tokens(chances: Sequence[float]) -> float:
    return float(np.cumprod([1.0, *chances]).sum())


def test_converges_to_the_truth_of_every_position() -> None:
    chances = (0.9, 0.75, 0.6, 0.45)
    acceptance = Acceptance(4)
    assert teach(acceptance, chances, 8, 2000) == []
    assert acceptance.by_position == pytest.approx(chances, abs=0.03)
    for gamma in range(5):
        assert acceptance.expected_tokens(gamma) == pytest.approx(true_tokens(chances[:gamma]), rel=0.02)
    assert acceptance.relative_error(4) < 0.02


def test_a_deep_chain_teaches_the_shorter_ones() -> None:
    acceptance = Acceptance(5)
    teach(acceptance, (0.9, 0.5, 0.3), 8, 500)
    for gamma, tokens in ((1, 1.9), (2, 2.35), (3, 2.485)):
        assert acceptance.expected_tokens(gamma) == pytest.approx(tokens, rel=0.03)
    assert acceptance.relative_error(1) < acceptance.relative_error(3) < acceptance.relative_error(5)


def test_a_position_never_tried_leans_on_the_one_before() -> None:
    acceptance = Acceptance(3)
    assert acceptance.by_position == pytest.approx([0.7, 0.7, 0.7])
    teach(acceptance, (0.2,), 8, 200)
    assert acceptance.by_position == pytest.approx([0.2, 0.2, 0.2], abs=0.03)


@pytest.mark.parametrize(
    ("before", "after", "batch_size", "within"),
    [
        *((before, after, *limit) for before, after in ((0.75, 0.3), (0.3, 0.75)) for limit in ((2, 30), (16, 8))),
        (0.7, 0.55, 16, 25),  # a small shift takes longer
        (0.7, 0.55, 64, 10),
    ],
)
def test_a_change_is_found_soon_and_learned(before: float, after: float, batch_size: int, within: int) -> None:
    acceptance = Acceptance(3)
    assert teach(acceptance, (before,) * 3, batch_size, 1000) == []
    found = teach(acceptance, (after,) * 3, batch_size, 300, seed=2)
    assert found and found[0] < within
    assert acceptance.changes == len(found)
    assert acceptance.expected_tokens(3) == pytest.approx(true_tokens((after,) * 3), rel=0.08)


@pytest.mark.parametrize(("batch_size", "chance"), [(1, 0.6), (32, 0.8)])
def test_steady_acceptance_raises_no_alarm(batch_size: int, chance: float) -> None:
    acceptance = Acceptance(3)
    assert teach(acceptance, (chance,) * 3, batch_size, 50_000) == []
    assert acceptance.changes == 0


def test_gammas_that_vary_are_no_change() -> None:
    acceptance = Acceptance(4)
    rows = [draws((0.7,) * gamma, 8, 3000, seed=gamma) for gamma in (1, 2, 4)]
    for group in zip(*rows, strict=True):
        for gamma, row in zip((1, 2, 4), group, strict=True):
            assert not acceptance.observe(gamma, row)


def test_nothing_drafted_teaches_nothing() -> None:
    acceptance = Acceptance(3)
    teach(acceptance, (0.5,) * 3, 8, 50)
    before = acceptance.snapshot()
    assert not acceptance.observe(3, ())
    assert not acceptance.observe(3, (0, 0))
    assert acceptance.snapshot() == before


HISTOGRAMS = st.lists(st.integers(0, 300), min_size=1, max_size=6).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(HISTOGRAMS, max_size=60))
def test_more_drafts_never_commit_fewer_tokens(rows: list[tuple[int, ...]]) -> None:
    acceptance = Acceptance(5)
    for row in rows:
        acceptance.observe(max(1, len(row) - 1), row[: max(1, len(row) - 1) + 1])
    expected = [acceptance.expected_tokens(gamma) for gamma in range(6)]
    assert expected[0] == 1.0
    for gamma in range(5):
        assert expected[gamma] <= expected[gamma + 1] <= expected[gamma] + 1.0
    assert all(0.0 <= chance <= 1.0 for chance in acceptance.by_position)
    assert all(math.isfinite(acceptance.relative_error(gamma)) for gamma in range(6))


def test_a_snapshot_learns_the_same() -> None:
    acceptance, restored = Acceptance(3), Acceptance(3)
    teach(acceptance, (0.6, 0.5, 0.4), 8, 77)
    restored.restore(json.loads(json.dumps(acceptance.snapshot())))
    assert restored.by_position == acceptance.by_position
    assert teach(restored, (0.2,) * 3, 8, 50, seed=3) == teach(acceptance, (0.2,) * 3, 8, 50, seed=3) != []
    assert restored.snapshot() == acceptance.snapshot()


def test_requests_that_did_not_draft_are_left_out() -> None:
    assert drafting_requests(observation(3, (4, 2, 1))) == [4, 2, 1]
    assert drafting_requests(observation(3, (4, 2, 1), drafted=5)) == [2, 2, 1]
    assert drafting_requests(observation(3, (4, 2, 1), drafted=7)) == [4, 2, 1]
    assert drafting_requests(observation(3, (1, 2), drafted=0)) == [0, 2]  # never negative
    assert drafting_requests(observation(3, (), drafted=0)) == []
