"""`off` and `static:N`."""

import pytest
from baseline_world import World, observation, run, states

from sglang_nightjar.policy.base import Residency
from sglang_nightjar.policy.baselines.fixed import Fixed

WORLD = World(0.5, draft_s=0.002)


def test_decides_its_gamma_whatever_is_seen() -> None:
    assert set(run(Fixed(3, 5), WORLD, states(20))) == {3}
    assert set(run(Fixed(0, 5), WORLD, states(20))) == {0}


@pytest.mark.parametrize("residency", [Residency.EVICTING, Residency.EVICTED, Residency.RELOADING])
def test_does_not_speculate_without_a_resident_draft(residency: Residency) -> None:
    assert set(run(Fixed(3, 5), WORLD, states(3, residency=residency))) == {0}


def test_rejects_a_gamma_out_of_range() -> None:
    with pytest.raises(ValueError, match="gamma is 6"):
        Fixed(6, 5)
    with pytest.raises(ValueError, match="gamma is -1"):
        Fixed(-1, 5)


def test_rejects_a_bad_observation() -> None:
    with pytest.raises(ValueError, match="gamma"):
        Fixed(3, 5).observe(observation(6, (1,)))
