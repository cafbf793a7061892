"""The draft's residency and the size of the KV pool that follows from it."""

from typing import Protocol

from sglang_nightjar.policy.base import Move, Residency


class PoolCosts(Protocol):
    """What the pool needs to know of a set-up; `roofline.StepCost` and `measured.MeasuredCost` answer it."""

    def slots(self, resident: bool) -> int: ...

    def relocate_s(self, slots: float) -> float: ...

    def reload_s(self) -> float: ...


class ElasticPool:
    """RESIDENT -> EVICTING -> EVICTED -> RELOADING -> RESIDENT.

    Evicting drops the draft's weights and KV (its weights stay mirrored in host memory) and takes
    `evict_s` in the background; then the pool grows. Reloading first shrinks the pool, in the step
    that starts it: what is in use plus `margin` slots must fit the smaller pool, else the move is
    postponed; live slots of the tail are relocated, which stops decoding; then the weights come
    over the host link while decoding goes on at gamma 0.

    Attributes:
        total: KV slots of the pool now.
        residency: where the draft is.
        evictions, reloads, postponed: moves done, and reloads refused for lack of room.
    """

    def __init__(self, costs: PoolCosts, *, evict_s: float, move_s: float, margin: int, evicted: bool = False) -> None:
        self._costs = costs
        self._evict_s, self._move_s, self._margin = evict_s, move_s, margin
        self.small, self.large = costs.slots(True), costs.slots(False)
        self.residency = Residency.EVICTED if evicted else Residency.RESIDENT
        self.total = self.large if evicted else self.small
        self._done_s = 0.0
        self.evictions = self.reloads = self.postponed = 0

    def advance(self, now_s: float) -> None:
        """Finishes a transition whose time has come."""
        if self.residency is Residency.EVICTING and now_s >= self._done_s:
            self.residency = Residency.EVICTED
            self.total = self.large
        elif self.residency is Residency.RELOADING and now_s >= self._done_s:
            self.residency = Residency.RESIDENT

    def move(self, move: Move, now_s: float, used: int) -> float:
        """Starts `move` where the draft's state allows it; returns the seconds decoding stops for it."""
        if move is Move.EVICT and self.residency is Residency.RESIDENT:
            self.residency = Residency.EVICTING
            self._done_s = now_s + self._evict_s
            self.evictions += 1
            return self._move_s
        if move is Move.RELOAD and self.residency is Residency.EVICTED:
            if used + self._margin > self.small:
                self.postponed += 1
                return 0.0
            # Live slots lie scattered over the pool, so this share of them is in the tail to be given back.
            pause = self._move_s + self._costs.relocate_s(used * (self.large - self.small) / self.large)
            self.total = self.small
            self.residency = Residency.RELOADING
            self._done_s = now_s + pause + self._costs.reload_s()
            self.reloads += 1
            return pause
        return 0.0
