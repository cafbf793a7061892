"""TETRIS's gamma and verification budget."""

import pytest
from baseline_world import World, assert_replays, observation, states

from sglang_nightjar.policy.base import Residency
from sglang_nightjar.policy.baselines.tetris import Tetris, TetrisConfig


def test_the_budget_follows_the_batch() -> None:
    tetris = Tetris(4, 6, TetrisConfig(extra=1))
    assert tetris.verify_budget() is None
    for batch_size in (2, 8, 64):
        assert tetris.decide(states(1, batch_size)[0]) == 4
        assert tetris.verify_budget() == 3 * batch_size


def test_a_small_batch_drafts_the_share_and_verifies_all() -> None:
    tetris = Tetris(4, 6, TetrisConfig(extra=1, least_batch=2))
    tetris.decide(states(1, 8)[0])
    assert tetris.decide(states(1, 1)[0]) == 3
    assert tetris.verify_budget() is None


def test_a_fixed_capacity_is_never_above_what_is_drafted() -> None:
    tetris = Tetris(4, 6, TetrisConfig(capacity=40))
    tetris.decide(states(1, 5)[0])
    assert tetris.verify_budget() == 20
    tetris.decide(states(1, 50)[0])
    assert tetris.verify_budget() == 40


def test_no_budget_without_a_resident_draft() -> None:
    tetris = Tetris(4, 6)
    tetris.decide(states(1)[0])
    assert tetris.decide(states(1, residency=Residency.RELOADING)[0]) == 0
    assert tetris.verify_budget() is None


def test_a_snapshot_keeps_the_budget() -> None:
    assert_replays(lambda: Tetris(4, 6), World(0.7, draft_s=0.002), states(3), states(3, 1))
    tetris, restored = Tetris(4, 6), Tetris(4, 6)
    tetris.decide(states(1)[0])
    restored.restore(tetris.snapshot())
    assert restored.verify_budget() == tetris.verify_budget() == 24


@pytest.mark.parametrize(
    ("gamma", "config", "named"),
    [
        (7, None, "gamma"),
        (0, None, "gamma"),
        (3, TetrisConfig(extra=3), "extra"),
        (3, TetrisConfig(capacity=0), "capa"),
    ],
)
def test_rejects_what_cannot_be(gamma: int, config: TetrisConfig | None, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Tetris(gamma, 6, config)


def test_rejects_a_bad_observation() -> None:
    with pytest.raises(ValueError, match="committed"):
        Tetris(4, 6).observe(observation(1, (1, 1, 1)))
