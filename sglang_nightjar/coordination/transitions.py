"""Rank 0: turns a wanted move of the draft into the turns every rank makes, one directive at a time.

want -> prepared and agreed -> EVICT .. EVICTED     or    RELOAD .. RESIDENT
a rank fails in between     -> the opposite turn, on every rank, until that ends
undoing fails as well       -> EVICTED with the small pool: the one state that needs no memory
"""

import logging
from dataclasses import dataclass

from sglang_nightjar.coordination.coordinator import Coordinator, Phase
from sglang_nightjar.coordination.messages import Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NextTurn:
    """What the coming directive carries."""

    turn: Turn
    epoch: int
    slots: int = 0


class Transitions:
    """One transition at a time.

    Attributes:
        completed: transitions that ended as wanted. undone: those that failed and were undone.
    """

    def __init__(self, coordinator: Coordinator, *, slots_small: int, slots_large: int) -> None:
        self._coordinator = coordinator
        self._small, self._large = slots_small, slots_large
        self._turn = Turn.NONE  # begun or wanted
        self._undoing = False
        self.completed = self.undone = 0

    @property
    def in_progress(self) -> bool:
        """Whether a transition is being prepared, made or undone."""
        return self._coordinator.phase is not Phase.IDLE

    def want(self, turn: Turn, step: int, refusal: str | None) -> bool:
        """Begins to prepare `turn` (EVICT or RELOAD), which directive `step` may carry; False while another runs.

        `refusal`: why rank 0 itself cannot, as in `Coordinator.prepare`.
        """
        assert turn.begins, f"{turn.name} does not begin a transition"
        if self.in_progress:
            return False
        self._turn, self._undoing = turn, False
        self._coordinator.prepare(turn, self._coordinator.epoch + 1, step, refusal)
        return True

    @property
    def due(self) -> bool:
        """Whether the coming directive must carry a turn."""
        return self._coordinator.phase in (Phase.AGREED, Phase.ENDED, Phase.FAILED)

    def next_turn(self) -> NextTurn | None:
        """What the coming directive carries, if anything: it is taken to be on its way from now on."""
        coordinator = self._coordinator
        if coordinator.phase is Phase.AGREED:
            coordinator.begun()
            return NextTurn(self._turn, coordinator.epoch)
        if coordinator.phase is Phase.ENDED:
            coordinator.closed()
            if self._undoing:
                self.undone += 1
            else:
                self.completed += 1
            if self._turn is Turn.EVICT:
                return NextTurn(Turn.EVICTED, coordinator.epoch, self._large)
            return NextTurn(Turn.RESIDENT, coordinator.epoch)
        if coordinator.phase is Phase.FAILED:
            if self._undoing:
                logger.error("undoing failed too: the draft stays away and the pool small")
                coordinator.closed()
                self.undone += 1
                return NextTurn(Turn.EVICTED, coordinator.epoch, self._small)
            self._undoing = True
            self._turn = Turn.RELOAD if self._turn is Turn.EVICT else Turn.EVICT
            coordinator.undoing(coordinator.epoch + 1)
            return NextTurn(self._turn, coordinator.epoch)
        return None
