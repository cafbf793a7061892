"""Policy names as users write them."""

import pytest

from sglang_nightjar.errors import UserError
from sglang_nightjar.policy.registry import KNOWN_POLICIES, PolicySpec, parse_policy


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("off", PolicySpec("off", 0)),
        ("static:0", PolicySpec("static", 0)),
        ("static:3", PolicySpec("static", 3)),
        ("static:+3", PolicySpec("static", 3)),
        ("static:5", PolicySpec("static", 5)),
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
    ],
)
def test_refused(text: str, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_policy(text, max_gamma=5)
    assert expected in str(raised.value)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="off, static:N"):
        parse_policy("nightjar", max_gamma=5)
    assert KNOWN_POLICIES == ("off", "static:N")
