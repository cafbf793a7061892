"""Policy names as users write them."""

import dataclasses

import pytest

from sglang_nightjar.errors import UserError
from sglang_nightjar.policy.base import Residency, State
from sglang_nightjar.policy.registry import KNOWN_POLICIES, PolicyOptions, PolicySpec, make_policy, parse_policy


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("off", PolicySpec("off", 0)),
        ("static:0", PolicySpec("static", 0)),
        ("static:3", PolicySpec("static", 3)),
        ("static:+3", PolicySpec("static", 3)),
        ("static:5", PolicySpec("static", 5)),
        ("nightjar", PolicySpec("nightjar", 5)),
        ("tetris", PolicySpec("tetris", 3)),
        ("tetris:4", PolicySpec("tetris", 4)),
        ("random", PolicySpec("random", 5)),
        ("random:2", PolicySpec("random", 5, steps=2)),
    ],
)
def test_known(text: str, spec: PolicySpec) -> None:
    assert parse_policy(text, max_gamma=5) == spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "unknown policy ''"),
        ("of", "unknown policy 'of'"),
        ("off:3", "unknown policy 'off:3'"),
        ("Static:3", "unknown policy 'Static:3'"),
        ("static", "needs a whole number after the colon, for example static:3"),
        ("static:", "needs a whole number"),
        ("static:3.0", "needs a whole number"),
        ("static:1_0", "needs a whole number"),
        ("static: 3", "needs a whole number"),
        ("static:three", "needs a whole number"),
        ("static:-1", "gamma must not be negative; use static:0 or off"),
        ("static:6", "gamma exceeds --nightjar-max-gamma 5; raise it or lower gamma"),
        ("static:999999999999999999999", "gamma exceeds"),
        ("nightjar:3", "unknown policy 'nightjar:3'"),
        ("tetris:6", "gamma exceeds"),
        ("random:0", "must be at least 1"),
    ],
)
def test_refused(text: str, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_policy(text, max_gamma=5)
    assert expected in str(raised.value)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError) as raised:
        parse_policy("magic", max_gamma=5)
    assert ", ".join(KNOWN_POLICIES) in str(raised.value)


@pytest.mark.parametrize("name", KNOWN_POLICIES)
def test_every_known_policy_can_be_made_and_asked(name: str) -> None:
    policy = make_policy(parse_policy(name.replace("N", "2"), max_gamma=5), PolicyOptions(max_gamma=5, seed=1))
    state = State(now_s=0.0, batch_size=4, kv_tokens=400, free_slots=1000, total_slots=2000)
    assert 0 <= policy.decide(state) <= 5
    assert policy.decide(dataclasses.replace(state, residency=Residency.EVICTED)) == 0
