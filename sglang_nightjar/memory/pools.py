"""The KV pool as residency sees it: the sizes it can have, and what resizes it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """KV slots with the draft on the device, and without; and, to compare, if its KV stayed and only its weights left,
    as in the paper."""

    small: int
    large: int
    weights_only: int


class Pool(Protocol):
    """A buffer set of KV slots that resizes in place (`memory/elastic_pool.py`)."""

    @property
    def nbytes(self) -> int: ...

    def bytes_for(self, slots: int) -> int: ...

    def resize(self, slots: int) -> None: ...

    def resized(self, slots: int) -> None: ...


class Allocator(Protocol):
    """Hands out KV slots (`memory/elastic_allocator.py`)."""

    def grow(self, size: int) -> None: ...

    def shrink(self, size: int) -> None: ...
