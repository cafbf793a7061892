"""Rank 0's side: two-phase transitions, and a watch on the other ranks.

    IDLE -> PREPARING -> AGREED -> IDLE      every rank said ready; the commit travels in a directive
                      -> IDLE                a refusal, a timeout, or a lost rank: aborted everywhere

`AGREED` only says that every rank can. What makes it happen, at one step on all ranks, is the
directive that carries the new epoch through the lockstep channel. Late, doubled and strange
messages change nothing and are counted.
"""

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_nightjar.coordination.messages import (
    Abort,
    Prepare,
    Ready,
    Refuse,
    Telemetry,
    decode_message,
    encode_message,
)
from sglang_nightjar.coordination.transport import Transport

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    AGREED = "agreed"


@dataclass(slots=True)
class Events:
    """What happened on the asynchronous channel since the start."""

    received: int = 0
    unsent: int = 0
    malformed: int = 0
    stale: int = 0
    repeated: int = 0
    refused: int = 0
    timed_out: int = 0
    aborted: int = 0
    agreed: int = 0
    disagreements: int = 0


class Coordinator:
    """Asks ranks 1 .. `ranks` - 1; rank 0 itself answers through `can`.

    Attributes:
        phase: of the transition in progress.
        epoch: the epoch it would begin.
        events: counters for `/server_info`.
    """

    def __init__(self, transport: Transport, ranks: int, clock: Callable[[], float], timeout_s: float = 5.0) -> None:
        self._transport = transport
        self._others = range(1, ranks)
        self._clock = clock
        self._timeout_s = timeout_s
        self._asked_s = 0.0
        self._ready: set[int] = set()
        self._prepare = Prepare(0, 0, "")
        self._digests: dict[int, int] = {}  # step -> digest of rank 0, the last few
        self.phase = Phase.IDLE
        self.epoch = 0
        self.events = Events()
        self.last_seen: dict[int, tuple[int, float]] = {}  # rank -> (step, time)

    def prepare(self, kind: str, epoch: int, step: int, can: bool = True) -> None:
        """Begins a transition: asks every rank. `can`: whether rank 0 itself can."""
        assert self.phase is Phase.IDLE, f"epoch {self.epoch} is still {self.phase.value}"
        assert epoch > self.epoch, f"epoch {epoch} is not after {self.epoch}"
        self.phase, self.epoch = Phase.PREPARING, epoch
        self._prepare = Prepare(epoch, step, kind)
        self._ready = set()
        self._asked_s = self._clock()
        if not can:
            self.abort(step, "rank 0 cannot")
            return
        for rank in self._others:
            self._send(rank, self._prepare)
        self._settle()

    def poll(self) -> None:
        """Reads what has arrived, and gives up on a transition that takes too long. Never waits."""
        for data in self._transport.receive():
            self.events.received += 1
            try:
                message = decode_message(data)
            except msgspec.DecodeError:
                self.events.malformed += 1
                continue
            self._handle(message)
        if self.phase is Phase.PREPARING and self._clock() - self._asked_s > self._timeout_s:
            missing = sorted(set(self._others) - self._ready)
            self.events.timed_out += 1
            self.abort(self._prepare.step, f"no answer from ranks {missing} in {self._timeout_s} s")

    def _handle(self, message: object) -> None:
        match message:
            case Telemetry(rank, _, step, digest):
                self.last_seen[rank] = (step, self._clock())
                if self._digests.get(step, digest) != digest:
                    self.events.disagreements += 1
                    logger.error("rank %d followed other directives than rank 0 up to step %d", rank, step)
            case Ready(rank, epoch, _) | Refuse(rank, epoch, _, _) if (
                epoch != self.epoch or self.phase is Phase.IDLE or rank not in self._others
            ):
                self.events.stale += 1
            case Ready(rank, _, _):
                if rank in self._ready:
                    self.events.repeated += 1
                self._ready.add(rank)
                self._settle()
            case Refuse(rank, _, step, reason):
                self.events.refused += 1
                self.abort(step, f"rank {rank} refused: {reason}")
            case _:
                self.events.malformed += 1  # only rank 0 sends these

    def _settle(self) -> None:
        if self.phase is Phase.PREPARING and self._ready.issuperset(self._others):
            self.phase = Phase.AGREED
            self.events.agreed += 1

    def abort(self, step: int, reason: str) -> None:
        """Ends the transition in progress everywhere; nothing has changed yet."""
        assert self.phase is not Phase.IDLE, "there is nothing to abort"
        self.phase = Phase.IDLE
        self.events.aborted += 1
        logger.warning("transition to epoch %d aborted: %s", self.epoch, reason)
        for rank in self._others:
            self._send(rank, Abort(self.epoch, step, reason))

    def committed(self) -> None:
        """The directive with the new epoch is on its way to every rank."""
        assert self.phase is Phase.AGREED, f"epoch {self.epoch} is {self.phase.value}, not agreed"
        self.phase = Phase.IDLE

    def note(self, step: int, digest: int) -> None:
        """Remembers rank 0's own digest at `step`, to compare the others' with."""
        self._digests[step] = digest
        while len(self._digests) > 64:
            del self._digests[next(iter(self._digests))]

    def _send(self, rank: int, message: Prepare | Abort) -> None:
        if not self._transport.send(rank, encode_message(message)):
            self.events.unsent += 1
