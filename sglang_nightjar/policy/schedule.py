"""When to explore: blocks of doubling length, cut into bins whose arm stays locked.

ADA-BINGREEDY's hierarchy as Nightjar uses it (arXiv 2512.22420, section on the planner): per
context, block j = 1, 2, ... lasts H_j = 2^(j-1) decisions and is cut into bins of about
sqrt(H_j) decisions. Bin b = 1, 2, ... of a block explores with probability 1/b. Exploration
thus costs O(sqrt(T) log T) decisions out of T, and never happens more often than once a bin.
"""

import math
from typing import Any


class BinSchedule:
    """Counts one context's decisions into bins and blocks.

    Attributes:
        block: number j of the block in progress, from 1; 0 before the first decision.
        bin: number b of the bin in progress within its block, from 1.
    """

    __slots__ = ("_bin_left", "_block_left", "bin", "block")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets the past: the next decision opens block 1."""
        self.block = 0
        self.bin = 0
        self._block_left = 0
        self._bin_left = 0

    def step(self, longest_bin: int | None = None) -> bool:
        """Counts one decision; True where it opens a new bin, so that an arm is to be chosen.

        `longest_bin`: cuts blocks into more bins of at most this many decisions, where an arm must not
        stay locked for long; the block then still explores only about ln(its number of bins) times.
        """
        opens = self._bin_left == 0
        if opens:
            if self._block_left == 0:
                self.block += 1
                self.bin = 0
                self._block_left = block_length(self.block)
            self.bin += 1
            length = bin_length(self.block)
            self._bin_left = min(length, longest_bin or length, self._block_left)
        self._bin_left -= 1
        self._block_left -= 1
        return opens

    @property
    def exploration_probability(self) -> float:
        """Probability with which the bin just opened explores: 1 / b."""
        return 1.0 / self.bin

    @property
    def bin_left(self) -> int:
        """Decisions left in the bin in progress, after the one just counted."""
        return self._bin_left

    def snapshot(self) -> list[int]:
        return [self.block, self.bin, self._block_left, self._bin_left]

    def restore(self, saved: list[Any]) -> None:
        self.block, self.bin, self._block_left, self._bin_left = (int(value) for value in saved)


def block_length(block: int) -> int:
    """H_j = 2^(j-1), decisions."""
    return 1 << (block - 1)


def bin_length(block: int) -> int:
    """About sqrt(H_j), decisions: rounded up, at least 1."""
    length = math.isqrt(block_length(block))
    return length if length * length == block_length(block) else length + 1
