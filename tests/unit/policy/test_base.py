"""What an observation may say."""

import re

import pytest
from baseline_world import BAD_OBSERVATIONS, observation
from hypothesis import given
from hypothesis import strategies as st

from sglang_nightjar.policy.base import Observation, StepKind, check_observation


@pytest.mark.parametrize(("field", "seen"), BAD_OBSERVATIONS)
def test_an_error_names_the_field_that_cannot_be(field: str, seen: Observation) -> None:
    with pytest.raises(ValueError, match=rf"^observation field {re.escape(field)} "):
        check_observation(seen, max_gamma=3)


def test_an_error_shows_the_value() -> None:
    with pytest.raises(ValueError, match="nan"):
        check_observation(observation(1, (2, 2), float("nan")), max_gamma=3)
    with pytest.raises(ValueError, match="kv_tokens is -7"):
        check_observation(observation(1, (2, 2), kv_tokens=-7), max_gamma=3)


@pytest.mark.parametrize(
    "seen",
    [
        observation(0, (4,)),
        observation(3, (1, 1, 1, 1)),
        observation(3, (4,)),  # shorter than gamma + 1: nothing was accepted
        observation(0, (), kind=StepKind.PREFILL, prefill_tokens=4096),
        observation(3, (1,), cut=2, cut_tokens=8),
        observation(3, (1, 2), drafted=0),
        observation(1, (2, 2), 0.03, catchup_seconds=0.03, catchup_tokens=100),  # all of the step
        observation(1, (2, 2), 1e-6),
        observation(1, (2, 2), 3600.0),
    ],
)
def test_what_a_server_can_see_passes(seen: Observation) -> None:
    check_observation(seen, max_gamma=3)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 9))
def test_tokens_are_those_of_all_requests(committed: list[int], cut: int, cut_tokens: int) -> None:
    seen = observation(3, tuple(committed), cut=cut, cut_tokens=cut_tokens)
    each = [index + 1 for index, requests in enumerate(committed) for _ in range(requests)]
    assert seen.tokens == sum(each) + cut_tokens
    if cut_tokens <= 4 * cut:
        check_observation(seen, max_gamma=3)
    else:
        with pytest.raises(ValueError, match="cut_tokens"):
            check_observation(seen, max_gamma=3)
