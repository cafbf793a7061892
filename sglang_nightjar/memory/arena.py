"""Address space reserved once, memory given to parts of it and taken back: buffers resize without moving.

An `Arena` is one reservation of a device's address space. Tensors over it are made once and
stay; committing puts memory under a range, decommitting takes it away. `Regions` lays the K
and V buffers of all layers out in an arena and resizes them together.

Upstream has the same idea, growing only: `sglang.srt.mem_cache.kv_vmm_backing`.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

import torch


class CommitError(Exception):
    """The device would not give the memory, or not take it back; nothing has changed."""


class Arena(Protocol):
    """One reservation of address space. Sizes and the offsets of commits are bytes, multiples of `granularity`.

    One commit or decommit at a time, from any thread; tensors may be used meanwhile.

    Attributes:
        granularity: smallest unit that can be committed.
        size: bytes reserved.
        address: where the reservation begins.
    """

    granularity: int
    size: int
    address: int

    @property
    def committed(self) -> int:
        """Bytes that have memory under them."""
        ...

    def commit(self, start: int, stop: int) -> None:
        """Puts zeroed memory under [start, stop), none of which may have any; `CommitError` where there is none."""
        ...

    def decommit(self, start: int, stop: int) -> None:
        """Takes the memory under [start, stop) away, with its contents; all of it must have some."""
        ...

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view of the addresses from `start`, committed or not; keeps the reservation alive.

        `start` is a multiple of the element size.
        """
        ...

    def close(self) -> None:
        """Ends the reservation, or leaves that to the last tensor over it."""
        ...


class CommitMap:
    """Which bytes of an arena are committed, and the checks every arena makes before it acts.

    Kept as the sorted offsets at which memory begins and ends, in turn.
    """

    def __init__(self, size: int, granularity: int) -> None:
        assert size > 0 and size % granularity == 0, f"arena of {size} bytes, granularity {granularity}"
        self._size = size
        self._granularity = granularity
        self._edges: list[int] = []

    @property
    def committed(self) -> int:
        return sum(self._edges[1::2]) - sum(self._edges[::2])

    def require(self, start: int, stop: int, committed: bool) -> None:
        """Asserts that [start, stop) is a range of this arena, and all of it committed or none of it."""
        assert 0 <= start < stop <= self._size, f"range [{start}, {stop}) of an arena of {self._size} bytes"
        assert start % self._granularity == stop % self._granularity == 0, (
            f"range [{start}, {stop}) is not made of units of {self._granularity} bytes"
        )
        before = bisect_right(self._edges, start)
        assert before == bisect_left(self._edges, stop) and before % 2 == committed, (
            f"range [{start}, {stop}) must {'' if committed else 'not '}be committed; begins and ends: {self._edges}"
        )

    def flip(self, start: int, stop: int) -> None:
        """[start, stop) changed from all to none, or from none to all."""
        for edge in (start, stop):
            at = bisect_left(self._edges, edge)
            if self._edges[at : at + 1] == [edge]:
                del self._edges[at]  # two neighbours became one, or a range ended where this one does
            else:
                self._edges.insert(at, edge)


class Regions:
    """Buffers of one kind, e.g. K and V of every layer, that hold the same number of rows at any time.

    They lie one after the other in the arena from offset 0, each with addresses for `rows_max`
    rows; memory is under the first rows of each. A row is what one KV slot takes in one buffer.

    Args:
        arena: of at least `reserved_bytes(...)` bytes, nothing committed, used by nobody else.
        count: number of buffers.
        rows_max: rows each can grow to.
        row_bytes: bytes of one row of one buffer.
    """

    def __init__(self, arena: Arena, count: int, rows_max: int, row_bytes: int) -> None:
        needed = self.reserved_bytes(count, rows_max, row_bytes, arena.granularity)
        assert needed <= arena.size and arena.committed == 0, (
            f"{count} buffers of {rows_max} rows of {row_bytes} bytes need {needed} bytes of an empty arena; "
            f"this one has {arena.size}, {arena.committed} of them committed"
        )
        self._arena = arena
        self._rows_max = rows_max
        self._row_bytes = row_bytes
        self._starts = range(0, needed, needed // count)
        self._backed = 0  # bytes committed at the start of each buffer

    @staticmethod
    def reserved_bytes(count: int, rows_max: int, row_bytes: int, granularity: int) -> int:
        """Bytes of address space that such buffers take."""
        assert min(count, rows_max, row_bytes) > 0, f"{count} buffers of {rows_max} rows of {row_bytes} bytes"
        return count * _round_up(rows_max * row_bytes, granularity)

    @property
    def committed_rows(self) -> int:
        """Rows of each buffer that may be used: those asked for, and what rounding up to the granularity added."""
        return min(self._rows_max, self._backed // self._row_bytes)

    def bytes_for(self, rows: int) -> int:
        """Bytes committed, over all buffers, when they hold `rows` rows."""
        return len(self._starts) * self._rounded(rows)

    def rows_for(self, budget_bytes: int) -> int:
        """Most rows for which `bytes_for` is within the budget."""
        assert budget_bytes >= 0, f"a budget of {budget_bytes} bytes"
        each = budget_bytes // len(self._starts)
        return min(self._rows_max, (each - each % self._arena.granularity) // self._row_bytes)

    def resize(self, rows: int) -> None:
        """Makes every buffer hold `rows` rows, or none: contents of rows that stay are kept, new rows are zeros.

        Raises:
            CommitError: the device refused; all buffers are as they were, except that a refused
                shrink has zeroed rows it was to give up.
        """
        before, after = self._backed, self._rounded(rows)
        if before == after:
            return
        change, undo = self._arena.commit, self._arena.decommit
        if after < before:
            change, undo = undo, change
        low, high = min(before, after), max(before, after)
        for index, start in enumerate(self._starts):
            try:
                change(start + low, start + high)
            except CommitError as refusal:
                try:
                    for done in self._starts[:index]:
                        undo(done + low, done + high)
                except CommitError as error:  # which would say that nothing has changed
                    raise RuntimeError(f"buffers of different sizes: {error}, after: {refusal}") from error
                raise
        self._backed = after

    def tensor(self, index: int, shape_tail: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Buffer `index` as [rows_max, *shape_tail]; only its first `committed_rows` rows may be touched."""
        row_bytes = math.prod(shape_tail) * dtype.itemsize
        assert row_bytes == self._row_bytes, f"rows of {self._row_bytes} bytes seen as {row_bytes} bytes"
        return self._arena.tensor(self._starts[index], (self._rows_max, *shape_tail), dtype)

    def _rounded(self, rows: int) -> int:
        assert 0 <= rows <= self._rows_max, f"{rows} rows in buffers of at most {self._rows_max}"
        return _round_up(rows * self._row_bytes, self._arena.granularity)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
