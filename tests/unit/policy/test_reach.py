"""Which gammas a policy can ask for, against what the policies really ask for."""

import pytest

from sglang_nightjar.policy.base import State
from sglang_nightjar.policy.reach import gammas_at, reachable
from sglang_nightjar.policy.registry import KNOWN_POLICIES, PolicyOptions, make_policy, parse_policy

MAX_GAMMA = 5


@pytest.mark.parametrize("name", [name.replace(":N", ":3") for name in KNOWN_POLICIES] + ["tetris:4", "random:2"])
def test_no_policy_asks_for_more(name: str) -> None:
    spec = parse_policy(name, max_gamma=MAX_GAMMA)
    policy = make_policy(spec, PolicyOptions(spec.gamma or MAX_GAMMA, seed=3))
    for step in range(300):
        batch = 1 + step % 100
        assert policy.decide(State(float(step), batch)) in gammas_at(spec, batch), f"batch {batch}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("static:3", {0: (1, 2, 4, 8), 3: (1, 2, 4, 8)}),
        ("tetris:3", {0: (1, 2, 4, 8), 2: (1,), 3: (2, 4, 8)}),
        ("nightjar", dict.fromkeys(range(6), (1, 2, 4, 8))),
        # 1, 3 and 5 below 8 requests: the graph of 8 is also that of batches of 5 to 7; 0, 1 and 3 from 8 on.
        ("sglang-ema", {0: (1, 2, 4, 8), 1: (1, 2, 4, 8), 3: (1, 2, 4, 8), 5: (1, 2, 4, 8)}),
    ],
)
def test_pairs(name: str, expected: dict[int, tuple[int, ...]]) -> None:
    assert reachable(parse_policy(name, max_gamma=MAX_GAMMA), (8, 1, 4, 2), 8) == expected


def test_large_batches_of_a_policy_with_tiers() -> None:
    found = reachable(parse_policy("sglang-ema", max_gamma=MAX_GAMMA), (4, 16, 32, 48, 64, 96), 96)
    assert found == {0: (4, 16, 32, 48, 64, 96), 1: (4, 16, 32, 48, 64), 3: (4, 16, 32), 5: (4, 16)}


def test_batches_that_no_size_holds_are_told_too() -> None:
    """They run without a graph, but not without a state."""
    assert reachable(parse_policy("tetris:3", max_gamma=MAX_GAMMA), (1,), 2) == {0: (1,), 2: (1,), 3: ()}
    assert reachable(parse_policy("static:2", max_gamma=MAX_GAMMA), (), 4) == {0: (), 2: ()}
