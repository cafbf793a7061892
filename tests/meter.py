"""Test support: whose code a thread's time goes to, by a clock that changes hands at every metered call.

Each moment belongs to one owner, that of the innermost metered call; what is in none is owner 0's. Reading the clock
twice per call takes time of its own. `call_cost` measures it, and `net` takes it off.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_REST = "rest"


@dataclass(frozen=True, slots=True)
class CallCost:
    """What metering one call adds, ns: to the owner of the call (`inside`), and to that of the caller (`outside`)."""

    inside: float
    outside: float


class Meter:
    """For one thread: the calls of another would change the owner under its feet.

    Attributes:
        names: of the owners.
        spent: ns of each. entered: metered calls of each. made: metered calls made from its code.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self.names = [_REST]
        self.spent, self.entered, self.made = [0], [0], [0]
        self._owner = 0
        self._since = clock()

    def owner(self, name: str) -> int:
        """Number of the owner called `name`, a new one if need be."""
        if name not in self.names:
            self.names.append(name)
            for counts in (self.spent, self.entered, self.made):
                counts.append(0)
        return self.names.index(name)

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function`, its time charged to the owner called `name`."""
        owner = self.owner(name)
        clock, spent, entered, made = self._clock, self.spent, self.entered, self.made

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            caller = self._owner
            self._owner = owner
            now = clock()
            spent[caller] += now - self._since
            self._since = now
            try:
                return function(*args, **kwargs)
            finally:
                now = clock()
                spent[owner] += now - self._since
                self._since = now
                self._owner = caller
                entered[owner] += 1
                made[caller] += 1

        return metered

    def settle(self) -> None:
        """Charges what has passed until now."""
        now = self._clock()
        self.spent[self._owner] += now - self._since
        self._since = now


def call_cost(calls: int = 2000, rounds: int = 15, clock: Callable[[], int] = time.perf_counter_ns) -> CallCost:
    """Measured on a call that does nothing; medians of the `rounds`."""

    def nothing(first: object, second: object) -> None:
        pass

    costs = []
    for _ in range(rounds):
        meter = Meter(clock)
        metered = meter.timed(nothing, "nothing")
        begin = clock()
        for _ in range(calls):
            nothing(1, 2)
        plain = (clock() - begin) / calls
        begin = clock()
        for _ in range(calls):
            metered(1, 2)
        total = (clock() - begin) / calls - plain
        inside = max(meter.spent[1] / calls - plain, 0.0)
        costs.append((inside, max(total - inside, 0.0)))
    return CallCost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def net(spent: Sequence[float], entered: Sequence[float], made: Sequence[float], cost: CallCost) -> list[float]:
    """`spent` of each owner without what metering added to it, ns."""
    return [
        own - cost.inside * calls - cost.outside * from_it
        for own, calls, from_it in zip(spent, entered, made, strict=True)
    ]
