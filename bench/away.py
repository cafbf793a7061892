"""A server whose draft is away, so that its gamma is 0, for benchmarks that compare it with others."""

from serving import Server
from workload import nightjar

# What a hand has sent away, nothing but a hand brings back.
WORDS = ("--nightjar-policy", "static:3", "--nightjar-elastic", "on")


def send_away(server: Server) -> None:
    """Evicts the draft of a server started with `WORDS`."""
    server.post("/nightjar/evict", {})


def require_away(server: Server) -> None:
    """Ends the benchmark where the draft has come back."""
    if nightjar(server)["memory"]["residency"] != "EVICTED":
        raise SystemExit("the draft did not stay away: the figures mean nothing")
