"""The simulator's oracle."""

import pytest
from baseline_world import World, observation, states

from sglang_nightjar.policy.base import Residency, State
from sglang_nightjar.policy.baselines.oracle import Oracle

WORLD = World(0.8, draft_s=0.001, token_s=2e-4)


def seconds_per_token(state: State, gamma: int, previous: int) -> float:
    return 1.0 / WORLD.goodput(state.batch_size, state.kv_tokens, gamma)


def test_picks_the_best_gamma_of_every_batch_size() -> None:
    oracle = Oracle(6, seconds_per_token)
    decided = {}
    for batch_size in (1, 8, 64, 512):
        (state,) = states(1, batch_size)
        decided[batch_size] = oracle.decide(state)
        assert decided[batch_size] == WORLD.best(batch_size, state.kv_tokens, 6)
    assert decided[1] > decided[512]  # the world is not one where a constant would pass


def test_a_switch_worth_less_than_its_price_is_not_made() -> None:
    def cost(state: State, gamma: int, previous: int) -> float:
        return (2.0 if gamma == 0 else 1.5) + (1.0 if previous == 0 < gamma else 0.0)

    oracle = Oracle(1, cost)
    (state,) = states(1)
    assert oracle.decide(state) == 0
    oracle.restore({"previous": 1})
    assert oracle.decide(state) == 1
    assert oracle.snapshot() == {"previous": 1}
    (absent,) = states(1, residency=Residency.EVICTED)
    assert oracle.decide(absent) == 0
    assert oracle.decide(state) == 0  # back at the price of a switch


def test_a_tie_goes_to_the_smaller_gamma() -> None:
    assert Oracle(4, lambda state, gamma, previous: 3.0 if gamma == 0 else 1.0).decide(states(1)[0]) == 1


def test_rejects_a_bad_observation() -> None:
    with pytest.raises(ValueError, match="seconds"):
        Oracle(4, seconds_per_token).observe(observation(1, (1,), seconds=0.0))
