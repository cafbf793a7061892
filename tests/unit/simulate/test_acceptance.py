"""Acceptance against its expectation; drift; the verification budget."""

import numpy as np
import pytest

from sglang_nightjar.simulate.acceptance import (
    Acceptance,
    AcceptanceSpec,
    Domain,
    DriftPoint,
    commit_probabilities,
    expected_tokens,
    harmonic_tokens,
)


def test_expected_tokens_is_the_geometric_sum() -> None:
    assert float(expected_tokens(0.5, 3)) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert float(expected_tokens(0.5, 2, position_decay=0.5)) == pytest.approx(1 + 0.5 + 0.5 * 0.25)
    assert float(expected_tokens(1.0, 4)) == 5.0
    assert float(expected_tokens(0.9, 0)) == 1.0


def test_commit_probabilities_agree_with_the_expectation() -> None:
    alphas = np.array([0.2, 0.8])
    chance = commit_probabilities(alphas, 3)
    assert chance.sum() == pytest.approx(1.0)
    assert chance @ np.arange(1, 5) == pytest.approx(float(expected_tokens(alphas, 3).mean()))


def test_a_batch_in_steady_state_has_more_of_the_slow_requests() -> None:
    alphas = np.array([0.0, 1.0])  # 1 and 4 tokens a step: a request stays 1 or 1/4, so 2 per 1.25
    assert harmonic_tokens(alphas, 3) == pytest.approx(2 / 1.25)


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_sampled_lengths_have_the_expected_mean(gamma: int) -> None:
    acceptance = Acceptance(AcceptanceSpec(), 5, seed=1)
    alpha = np.full(400, 0.6)
    starts = acceptance.starts(400)
    total = sum(acceptance.accepted(starts + 7 * step, alpha, gamma, 0.0)[0].sum() for step in range(50))
    # 20,000 draws of a length with a standard deviation below 2: 5 sigma is 0.07.
    assert total / 20_000 + 1 == pytest.approx(float(expected_tokens(0.6, gamma)), abs=0.07)


def test_a_token_is_good_or_bad_whatever_gamma() -> None:
    acceptance = Acceptance(AcceptanceSpec(), 5, seed=2)
    alpha, place = np.full(100, 0.7), acceptance.starts(100)
    long, _ = acceptance.accepted(place, alpha, 5, 0.0)
    short, _ = acceptance.accepted(place, alpha, 2, 0.0)
    assert np.array_equal(short, np.minimum(long, 2))


def test_extremes() -> None:
    acceptance = Acceptance(AcceptanceSpec(), 4, seed=3)
    place = acceptance.starts(10)
    assert (acceptance.accepted(place, np.ones(10), 4, 0.0)[0] == 4).all()
    assert (acceptance.accepted(place, np.zeros(10), 4, 0.0)[0] == 0).all()


def test_alpha_is_drawn_with_the_domains_means() -> None:
    spec = AcceptanceSpec(domains=(Domain(0.3, weight=3.0), Domain(0.9, weight=1.0)))
    alpha = spec.draw(40_000, np.random.default_rng(0))
    assert alpha.mean() == pytest.approx(0.75 * 0.3 + 0.25 * 0.9, abs=0.01)
    assert ((alpha >= 0) & (alpha <= 1)).all()
    assert (AcceptanceSpec(domains=(Domain(1.0),)).draw(5, np.random.default_rng(0)) == 1.0).all()


def test_drift_abrupt_and_gradual() -> None:
    points = (DriftPoint(10, 0.5), DriftPoint(20, 0.2))
    abrupt = AcceptanceSpec(drift=points)
    assert [abrupt.scale(t) for t in (0, 9.9, 10, 19, 25)] == [1.0, 1.0, 0.5, 0.5, 0.2]
    assert AcceptanceSpec(drift=points, gradual=True).scale(5) == pytest.approx(0.75)
    acceptance = Acceptance(AcceptanceSpec(drift=(DriftPoint(10, 0.0),)), 3, seed=0)
    place = acceptance.starts(50)
    assert acceptance.accepted(place, np.ones(50), 3, 11.0)[0].sum() == 0


def test_a_budget_verifies_prefixes_of_the_likeliest_drafts() -> None:
    acceptance = Acceptance(AcceptanceSpec(calibration=1.0), 4, seed=4)
    place, alpha = acceptance.starts(64), np.full(64, 0.6)
    everything, verified = acceptance.accepted(place, alpha, 4, 0.0)
    assert verified == 256
    half, verified = acceptance.accepted(place, alpha, 4, 0.0, budget=128)
    assert verified == 128
    assert (half <= everything).all()
    # Half of the tokens, well chosen, keep much more than half of what is accepted.
    assert half.sum() > 0.75 * everything.sum()
    assert acceptance.accepted(place, alpha, 4, 0.0, budget=0)[0].sum() == 0
    assert np.array_equal(acceptance.accepted(place, alpha, 4, 0.0, budget=256)[0], everything)


def test_confidence_is_calibrated() -> None:
    """Of tokens that the draft gives probability q, a share q is accepted."""
    spec = AcceptanceSpec(calibration=1.0)
    acceptance = Acceptance(spec, 1, seed=5)
    place, alpha = acceptance.starts(40_000), np.full(40_000, 0.6)
    accepted, _ = acceptance.accepted(place, alpha, 1, 0.0)
    # Beta(1.5, 1) has q^1.5 of its mass below q: the best quarter lies above q = 0.75 ** (1 / 1.5).
    best, verified = acceptance.accepted(place, alpha, 1, 0.0, budget=10_000)
    low = 0.75 ** (1 / 1.5)
    mean = (1 - low**2.5) / (1 - low**1.5) * 1.5 / 2.5  # E[q | q > low]
    assert verified == 10_000
    assert best.sum() / 10_000 == pytest.approx(mean, abs=0.02)
    assert accepted.mean() == pytest.approx(0.6, abs=0.01)
