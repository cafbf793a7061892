"""The one owner of device bytes: every use has an account, and no sum exceeds the capacity.

Whoever takes memory of the device charges it here first, and releases it after giving it
back. On the CPU platform the device is a budget of host memory.
"""

import enum
from collections.abc import Mapping

from sglang_nightjar.errors import UserError


class Account(enum.Enum):
    """What device bytes are held for."""

    TARGET_WEIGHTS = "target_weights"
    TARGET_KV = "target_kv"
    DRAFT_WEIGHTS = "draft_weights"
    DRAFT_KV = "draft_kv"
    WORKSPACE = "workspace"


class OverBudget(UserError):
    """A charge exceeds what is free; nothing was charged."""


class Ledger:
    """Device bytes by account. One change at a time, from any thread; reading is always safe."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, f"a device of {capacity} bytes"
        self._capacity = capacity
        self._held: Mapping[Account, int] = dict.fromkeys(Account, 0)  # replaced whole by a change

    @property
    def free(self) -> int:
        """Bytes no account holds."""
        return self._capacity - sum(self._held.values())

    def held(self, account: Account) -> int:
        """Bytes the account holds."""
        return self._held[account]

    def charge(self, account: Account, nbytes: int) -> None:
        """Adds to an account; `OverBudget` where `nbytes` exceeds what is free."""
        assert nbytes >= 0, f"a charge of {nbytes} bytes to {account.value}"
        self.transfer({account: nbytes})

    def release(self, account: Account, nbytes: int) -> None:
        """Takes from an account what it no longer holds."""
        assert nbytes >= 0, f"a release of {nbytes} bytes from {account.value}"
        self.transfer({account: -nbytes})

    def transfer(self, changes: Mapping[Account, int]) -> None:
        """Changes several accounts at once, or none.

        Args:
            changes: bytes to add to each account, negative to take away.
        Raises:
            OverBudget: their sum exceeds what is free.
        """
        held = {account: nbytes + changes.get(account, 0) for account, nbytes in self._held.items()}
        for account, nbytes in held.items():
            assert nbytes >= 0, (
                f"{-changes[account]} bytes released from {account.value}, which holds {self._held[account]}"
            )
        total = sum(held.values())
        if total > self._capacity:
            names = ", ".join(account.value for account, change in changes.items() if change > 0)
            raise OverBudget(
                f"{names}: {sum(changes.values())} more bytes of device memory needed, {self.free} of "
                f"{self._capacity} are free; set --nightjar-device-memory to at least {total} bytes"
            )
        assert total == sum(self._held.values()) + sum(changes.values()), (
            f"{total} bytes held after changes of {sum(changes.values())} to {sum(self._held.values())}"
        )
        self._held = held

    def report(self) -> dict[str, int]:
        """Bytes by account, with `capacity` and `free`, for `/server_info`."""
        held = self._held
        by_name = {account.value: nbytes for account, nbytes in held.items()}
        return {"capacity": self._capacity, "free": self._capacity - sum(held.values()), **by_name}
