"""Tokens that are committed and not appended yet."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_nightjar.speculation.late_tokens import NONE_LATE, LateTokens, output_tokens


def request(rid: str, prompt: int, output: list[int]) -> Any:
    return SimpleNamespace(rid=rid, origin_input_ids=[0] * prompt, output_ids=array("q", output))


def test_only_what_is_missing_is_late() -> None:
    behind, up_to_date, fresh = request("a", 4, [1, 2]), request("b", 3, [5]), request("c", 2, [])
    late = LateTokens()
    late.remember([behind, up_to_date, fresh], [[3, 4, 5], [5], [9]])
    assert late.of([behind, up_to_date, fresh], [9, 4, 3]) == {"a": [3, 4, 5], "c": [9]}
    behind.output_ids.extend([3, 4, 5])
    assert late.of([behind], [9]) == {}, "processed meanwhile"


def test_a_step_is_kept_until_the_next() -> None:
    req = request("a", 1, [1])
    late = LateTokens()
    late.remember([req], [[2]])
    late.remember([], [])
    with pytest.raises(AssertionError, match="request a: 3 tokens committed, 1 not appended, 0 kept"):
        late.of([req], [3])


def test_a_run_of_another_length_is_noticed() -> None:
    req = request("a", 1, [1])
    late = LateTokens()
    late.remember([req], [[2, 3]])
    with pytest.raises(AssertionError, match="1 not appended, 2 kept"):
        late.of([req], [3])


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("stop", [*range(8), None])
def test_any_part_of_the_output(start: int, stop: int | None) -> None:
    req = request("a", 4, [10, 11, 12, 13])
    assert list(output_tokens(req, {"a": [14, 15, 16]}, start, stop)) == list(range(10, 17))[start:stop]
    assert list(output_tokens(req, {"b": [99]}, start, stop)) == list(range(10, 14))[start:stop]
    assert list(output_tokens(req, NONE_LATE, start, stop)) == list(range(10, 14))[start:stop]
