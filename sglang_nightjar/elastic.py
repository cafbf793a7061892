"""One per rank with elastic memory: joins what is decided (rank 0) to what every rank carries out.

Rank 0 wants a move (its planner, an operator, or an idle server); `coordination/` gets every rank's
agreement; the turn rides a directive; `memory/residency.py` makes it and reports when its
background work has ended; the last turn rides a directive again.
"""

from collections.abc import Callable
from typing import Any

from sglang_nightjar.coordination.agent import Agent
from sglang_nightjar.coordination.coordinator import Coordinator
from sglang_nightjar.coordination.messages import Directive, Prepare, Turn
from sglang_nightjar.coordination.transitions import NextTurn, Transitions
from sglang_nightjar.memory.residency import DraftResidency
from sglang_nightjar.policy.base import Move, Residency

_TURNS = {Move.EVICT: Turn.EVICT, Move.RELOAD: Turn.RELOAD}


class Elastic:
    """See the module's docstring.

    Attributes:
        memory: this rank's.
        keep_cached: as given.
    """

    def __init__(
        self,
        memory: DraftResidency,
        channel: Coordinator | Agent,
        clock: Callable[[], float],
        *,
        idle_reload_s: float,
        hold_s: float,
        keep_cached: Callable[[], bool],
        finish_step: Callable[[], None],
    ) -> None:
        """
        Args:
            idle_reload_s: how long a server must be idle before it takes its draft back.
            hold_s: how long a draft brought back by hand stays before the planner may evict it. One sent away by hand
                stays away until it is brought back by hand.
            keep_cached: whether cached prefixes are worth moving now.
            finish_step: no step is under way when it returns.
        """
        self.memory = memory
        self._channel = channel
        self._clock, self._idle_reload_s, self._hold_s = clock, idle_reload_s, hold_s
        self._held_until_s = float("-inf")
        self._sent_away = False  # the last eviction was made by hand
        self.keep_cached, self._finish_step = keep_cached, finish_step
        self._idle_since_s: float | None = None
        self._epoch = 0  # of the last turn made
        self._transitions: Transitions | None = None
        if isinstance(channel, Coordinator):
            self._transitions = Transitions(channel, slots_small=memory.sizes.small, slots_large=memory.sizes.large)
        else:
            channel.answer_with(self._can)

    @property
    def residency(self) -> Residency:
        return self.memory.state

    @property
    def moving(self) -> bool:
        """Whether the draft is between two places here, or rank 0 is about to move it."""
        return self.residency in (Residency.EVICTING, Residency.RELOADING) or (
            self._transitions is not None and self._transitions.in_progress
        )

    def _can(self, asked: Prepare) -> str | None:
        return self.memory.refusal(asked.turn)

    def refusal(self, turn: Turn) -> str | None:
        """Why `turn` cannot begin now, or None; the same on every rank at the same step."""
        return self.memory.refusal(turn)

    def want(self, turn: Turn, step: int, *, by_hand: bool = False) -> None:
        """Rank 0 asks the others about `turn`; directive `step` is the first that may carry it."""
        if self._transitions is None or self._transitions.in_progress:
            return
        if not by_hand and (self._clock() < self._held_until_s or (turn is Turn.RELOAD and self._sent_away)):
            return
        self._transitions.want(turn, step, self.memory.refusal(turn))
        if not self._transitions.in_progress:
            return
        if turn is Turn.EVICT:
            self._sent_away = by_hand
        if by_hand:
            self._held_until_s = self._clock() + self._hold_s

    def want_move(self, move: Move, step: int) -> None:
        """The same for a planner's decision."""
        if move in _TURNS:
            self.want(_TURNS[move], step)

    def iterate(self, idle: bool, step: int) -> None:
        """Every rank, every scheduler iteration, between steps. `idle`: nothing runs and nothing waits."""
        self.memory.iterate()
        ended = self.memory.outcome()
        if ended is not None:
            if isinstance(self._channel, Coordinator):
                self._channel.done(0, self._epoch, ended[1])
            else:
                self._channel.done(self._epoch, ended[1])
        if not idle or self.residency is not Residency.EVICTED:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = self._clock()
        elif self._clock() - self._idle_since_s >= self._idle_reload_s:
            self.want(Turn.RELOAD, step)

    @property
    def due(self) -> bool:
        """Rank 0: whether the next directive must carry a turn, also where nothing is to be decided."""
        return self._transitions is not None and self._transitions.due

    def next_turn(self) -> NextTurn | None:
        """Rank 0: the turn that the next directive carries."""
        return None if self._transitions is None else self._transitions.next_turn()

    def apply(self, directive: Directive) -> None:
        """Every rank: makes the directive's turn, if it has one, with no step under way."""
        if directive.turn is Turn.NONE:
            return
        self._finish_step()
        self._epoch = directive.epoch
        if isinstance(self._channel, Agent):
            self._channel.over()
            if directive.turn.begins:
                self._channel.commit(directive.epoch)
        self.memory.make(directive.turn, directive.slots, directive.keep_cached)

    def report(self) -> dict[str, Any]:
        """For `/server_info`."""
        transitions = self._transitions
        if transitions is None:
            return self.memory.report()
        sent_away = self._sent_away and self.residency is not Residency.RESIDENT
        made = {"completed": transitions.completed, "undone": transitions.undone, "sent_away": sent_away}
        return {**self.memory.report(), **made}
