"""Test support: moving a server's draft by hand."""

import time
import urllib.error
from typing import Any

from serving import Server, tail, wait_for
from workload import nightjar


def memory(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = nightjar(server)["memory"]
    return found


def ask(server: Server, move: str) -> bool:
    """Whether the server began the move."""
    try:
        server.post(f"/nightjar/{move}", {})
    except urllib.error.HTTPError as error:
        assert error.code == 409, error
        return False
    return True


def settle(server: Server, residency: str) -> None:
    """Brings the draft to `residency`, whatever it is doing."""
    move = "reload" if residency == "RESIDENT" else "evict"

    def there() -> bool:
        if memory(server)["residency"] == residency:
            return True
        ask(server, move)
        return False

    wait_for(
        there,
        deadline=time.monotonic() + 120,
        give_up=lambda: not server.alive(),
        failure=lambda: f"{memory(server)}\n{tail(server.log)}",
    )
