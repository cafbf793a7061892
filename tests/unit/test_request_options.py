"""What a request may ask of Nightjar."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_nightjar.speculation.request_options import check_options, speculates


def request(custom_params: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom_params))


@pytest.mark.parametrize("custom", [None, {}, {"other": 1}, {"nightjar": {}}, {"nightjar": {"speculate": True}}])
def test_speculates_unless_told_not_to(custom: Any) -> None:
    check_options(custom)
    assert speculates(request(custom))


def test_opt_out() -> None:
    check_options({"nightjar": {"speculate": False}})
    assert not speculates(request({"nightjar": {"speculate": False}}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (False, "must be an object, not bool"),
        ({"speculate": 0}, "must be true or false, not 0"),
        ({"speculate": "no"}, "must be true or false, not 'no'"),
        ({"gamma": 3}, "gamma is unknown; known: speculate"),
    ],
)
def test_malformed_options_are_named(options: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        check_options({"nightjar": options})
