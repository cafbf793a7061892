"""DSD's latency model, acceptance rate and choice."""

import dataclasses

import numpy as np
import pytest
from baseline_world import World, assert_replays, observation, run, states

from sglang_nightjar.policy.base import Residency, State, StepKind
from sglang_nightjar.policy.baselines.dsd import Dsd, DsdConfig, _fit, _terms

PLAIN = DsdConfig(plain_margin=1.0)


def mixed_states(rounds: int) -> list[State]:
    return [state for seed in range(rounds) for size in (1, 4, 16, 48, 96) for state in states(1, size, seed=seed)]


def test_finds_the_best_gamma_of_each_batch_size() -> None:
    # Verified tokens are dear, so that large batches must not speculate and small ones must.
    world = World(0.7, draft_s=0.001, token_s=1e-3, noise=0.05)
    dsd = Dsd(5, PLAIN)
    run(dsd, world, mixed_states(80))
    decided = {}
    for batch_size in (1, 16, 96):
        (state,) = states(1, batch_size)
        decided[batch_size] = dsd.decide(state)
        reached = world.goodput(batch_size, state.kv_tokens, decided[batch_size])
        best = world.goodput(batch_size, state.kv_tokens, world.best(batch_size, state.kv_tokens, 5))
        assert reached > 0.97 * best
    assert decided[1] >= 2 and decided[96] == 0


def test_the_fit_recovers_the_coefficients() -> None:
    true = np.array([0.02, 2e-8, 3e-5, 0.002, 1e-8, 1e-5])
    rng = np.random.default_rng(1)
    rows = [_terms(int(b), int(b * c), int(k)) for b, c, k in rng.integers((1, 100, 0), (64, 2000, 6), (300, 3))]
    design = np.array(rows)
    seconds = design @ true
    found = np.array(_fit(design.T @ design, design.T @ seconds))
    assert design @ found == pytest.approx(seconds, rel=0.01)


def test_no_coefficient_is_negative_even_where_the_data_says_so() -> None:
    design = np.array([_terms(b, 100 * b, k) for b in (1, 2, 3) for k in (0, 1)])
    seconds = np.array([0.03 - 0.001 * row[2] for row in design])
    assert min(_fit(design.T @ design, design.T @ seconds)) >= 0.0


def test_low_acceptance_turns_it_off_and_the_margin_asks_for_a_clear_gain() -> None:
    hopeless = World(0.05, draft_s=0.003)
    assert set(run(Dsd(4), hopeless, states(100))[40:]) == {0}
    slight = World(0.3, draft_s=0.001)  # at most 30 % better than plain decoding
    assert 0 not in run(Dsd(4, PLAIN), slight, states(200))[100:]
    assert set(run(Dsd(4, dataclasses.replace(PLAIN, plain_margin=1.5)), slight, states(200))[100:]) == {0}


def test_the_acceptance_rate_counts_judged_drafts_only() -> None:
    dsd = Dsd(4)
    # 3 drafts each: 0, 1, 2, 3 accepted; 6 accepted, 3 rejected, those after a rejection not judged.
    dsd.observe(observation(3, (1, 1, 1, 1)))
    assert dsd.snapshot()["acceptance"] == pytest.approx(0.7 + 0.15 * (6 / 9 - 0.7))
    before = dsd.snapshot()["acceptance"]
    dsd.observe(observation(3, (4,), drafted=0))
    dsd.observe(observation(0, (4,)))
    assert dsd.snapshot()["acceptance"] == before


def test_the_profile_tries_every_gamma_and_waits_for_the_draft() -> None:
    dsd = Dsd(3, DsdConfig(profile_rounds=2))
    world = World(0.7, draft_s=0.002)
    assert set(run(dsd, world, states(30, residency=Residency.EVICTED))) == {0}
    assert run(dsd, world, states(8)) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_only_the_decoding_part_of_a_step_is_fitted() -> None:
    dsd, plain = Dsd(3), Dsd(3)
    dsd.observe(observation(0, (4,), 9.0, kind=StepKind.MIXED, prefill_tokens=500))
    dsd.observe(observation(0, (), 9.0, kind=StepKind.PREFILL))
    dsd.observe(observation(2, (4,), 0.5, catchup_seconds=0.25, catchup_tokens=90))
    plain.observe(observation(2, (4,), 0.25))
    assert dsd.snapshot() == plain.snapshot()


def test_without_any_decoding_step_it_does_not_speculate() -> None:
    dsd = Dsd(3, DsdConfig(profile_rounds=0))
    assert dsd.decide(states(1)[0]) == 0


def test_a_snapshot_replays() -> None:
    world = World(0.7, draft_s=0.002, token_s=2e-4, noise=0.05)
    assert_replays(lambda: Dsd(5), world, mixed_states(10), mixed_states(30))


def test_rejects_a_bad_observation() -> None:
    with pytest.raises(ValueError, match="seconds"):
        Dsd(3).observe(observation(1, (1,), float("nan")))
