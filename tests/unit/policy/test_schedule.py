"""Blocks and bins."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_nightjar.policy.schedule import BinSchedule, bin_length, block_length


def bins(schedule: BinSchedule, decisions: int, longest_bin: int | None = None) -> list[list[tuple[int, int]]]:
    """(block, bin) of every decision, one list per bin that was opened."""
    found: list[list[tuple[int, int]]] = []
    for _ in range(decisions):
        if schedule.step(longest_bin):
            found.append([])
        found[-1].append((schedule.block, schedule.bin))
    return found


def test_the_first_blocks_by_hand() -> None:
    lengths = [len(opened) for opened in bins(BinSchedule(), 1 + 2 + 4 + 8 + 16)]
    # Blocks of 1, 2, 4, 8 and 16 decisions in bins of 1, 2, 2, 3 and 4; the last bin of the fourth is cut.
    assert lengths == [1, 2, 2, 2, 3, 3, 2, 4, 4, 4, 4]


def test_a_block_lasts_twice_as_long_as_the_one_before() -> None:
    blocks = 14
    counted = Counter(block for opened in bins(BinSchedule(), 2**blocks - 1) for block, _ in opened)
    assert counted == {block: 2 ** (block - 1) for block in range(1, blocks + 1)}


@given(st.integers(1, 60))
def test_a_bin_is_the_square_root_of_its_block_rounded_up(block: int) -> None:
    assert block_length(block) == 2 ** (block - 1)
    assert (bin_length(block) - 1) ** 2 < block_length(block) <= bin_length(block) ** 2


@given(st.integers(1, 5000), st.one_of(st.none(), st.integers(1, 40)))
def test_within_a_bin_nothing_opens(decisions: int, longest_bin: int | None) -> None:
    schedule = BinSchedule()
    left = 0
    for _ in range(decisions):
        before = (schedule.block, schedule.bin)
        opens = schedule.step(longest_bin)
        assert opens == (left == 0)
        assert ((schedule.block, schedule.bin) != before) == opens
        left = schedule.bin_left
        assert 0 <= left < bin_length(schedule.block)
        assert schedule.exploration_probability == 1.0 / schedule.bin


@given(st.integers(1, 30))
def test_no_bin_is_longer_than_the_longest(longest: int) -> None:
    found = bins(BinSchedule(), 2**11 - 1, longest)
    assert max(map(len, found)) == min(longest, bin_length(11))
    # Bins are numbered within their block, and blocks keep their length.
    numbers = [opened[0] for opened in found]
    for (block, number), (next_block, next_number) in zip(numbers, numbers[1:], strict=False):
        assert (next_block, next_number) in ((block, number + 1), (block + 1, 1))
    assert Counter(block for opened in found for block, _ in opened)[11] == 2**10


def test_after_a_restart_it_is_as_new() -> None:
    schedule = BinSchedule()
    bins(schedule, 77)
    schedule.restart()
    assert (schedule.block, schedule.bin, schedule.bin_left) == (0, 0, 0)
    assert bins(schedule, 200) == bins(BinSchedule(), 200)


@pytest.mark.parametrize("decisions", [0, 1, 3, 100, 1023])
def test_a_snapshot_goes_on_where_it_was_taken(decisions: int) -> None:
    schedule, restored = BinSchedule(), BinSchedule()
    for _ in range(decisions):
        schedule.step()
    restored.restore(json.loads(json.dumps(schedule.snapshot())))
    assert [(restored.step(), restored.bin) for _ in range(500)] == [
        (schedule.step(), schedule.bin) for _ in range(500)
    ]
