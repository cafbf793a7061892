"""The draft's weights on the host: made once, since weights never change, and copied back at a reload."""

from collections.abc import Callable
from typing import Protocol


class MirrorError(Exception):
    """The host mirror cannot be read, or does not hold what was written; the draft must not be used."""


class Mirror(Protocol):
    """A copy, on the host, of bytes that have a fixed address on the device. One thread at a time.

    Attributes:
        copied: bytes that were copied back, or set out to be, in all reloads together; any thread may look.
    """

    copied: int

    def restore(self, chunk_bytes: int, before_chunk: Callable[[], None]) -> str:
        """Copies everything back to its addresses, which have memory.

        Args:
            before_chunk: called before every `chunk_bytes`: it waits until they may be copied, or raises.
        Returns:
            Checksum of what arrived; all of it has.
        Raises:
            MirrorError: it could not be read or copied. Copies may still run after this or whatever
                `before_chunk` raised; `settle` waits for them.
        """
        ...

    def settle(self) -> None:
        """Returns when no copy runs, so that the memory may be taken away; `MirrorError` where that cannot be known."""
        ...

    def digest(self) -> str:
        """Checksum of what is on the device now, as `restore` gives it; `MirrorError` where it cannot be read."""
        ...

    def intact(self) -> str | None:
        """Why `restore` would fail, as far as can be seen without copying; None where nothing says so."""
        ...
