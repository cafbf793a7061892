"""Rank 0's side: two-phase transitions, and a watch on the other ranks.

    IDLE -> PREPARING -> AGREED -> WORKING -> ENDED -> IDLE     every rank was ready, and every rank's work ended well
                      -> IDLE                                   a refusal, a timeout, or a lost rank: nothing was begun
                                         -> FAILED -> WORKING   a rank failed or was silent: undone on every rank
                                                   -> IDLE      given up

`AGREED` only says that every rank can. What makes it happen, at one step on all ranks, is the
directive that carries the new epoch through the lockstep channel; so for the end, and for undoing
it. Late, doubled and strange messages change nothing and are counted.
"""

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sglang_nightjar.coordination.messages import (
    Abort,
    Done,
    Prepare,
    Ready,
    Refuse,
    Telemetry,
    Turn,
    decode_message,
    encode_message,
)
from sglang_nightjar.coordination.transport import Transport

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    AGREED = "agreed"
    WORKING = "working"
    ENDED = "ended"
    FAILED = "failed"


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
    failed: int = 0
    disagreements: int = 0


class Coordinator:
    """Asks ranks 1 .. `ranks` - 1; rank 0 answers by argument.

    Attributes:
        phase: of the transition in progress.
        epoch: of that transition.
        reason: why the last one was aborted or failed.
        events: counters for `/server_info`.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: int,
        clock: Callable[[], float],
        timeout_s: float = 5.0,
        work_timeout_s: float = 120.0,
    ) -> None:
        """`timeout_s`: for every rank to answer; `work_timeout_s`: for every rank's work to end."""
        self._transport = transport
        self._others = range(1, ranks)
        self._clock = clock
        self._timeout_s, self._work_timeout_s = timeout_s, work_timeout_s
        self._since_s = 0.0
        self._heard: set[int] = set()  # ranks that are ready, then those whose work has ended
        self._step = 0
        self._digests: dict[int, int] = {}  # step -> digest of rank 0, the last few
        self.phase = Phase.IDLE
        self.epoch = 0
        self.reason = ""
        self.events = Events()
        self.last_seen: dict[int, tuple[int, float]] = {}  # rank -> (step, time)

    def prepare(self, turn: Turn, epoch: int, step: int, refusal: str | None = None) -> None:
        """Asks every rank whether it can make `turn`. `refusal`: why rank 0 itself cannot."""
        assert self.phase is Phase.IDLE, f"epoch {self.epoch} is still {self.phase.value}"
        assert epoch > self.epoch, f"epoch {epoch} is not after {self.epoch}"
        self._enter(Phase.PREPARING, epoch)
        self._step = step
        if refusal is not None:
            self.abort(f"rank 0 refused: {refusal}")
            return
        for rank in self._others:
            self._send(rank, Prepare(epoch, step, turn))
        self._settle()

    def begun(self) -> None:
        """The directive that begins the transition is on its way to every rank."""
        assert self.phase is Phase.AGREED, f"epoch {self.epoch} is {self.phase.value}, not agreed"
        self._enter(Phase.WORKING, self.epoch)

    def undoing(self, epoch: int) -> None:
        """The directive that undoes a failed transition is on its way; it counts as an epoch of its own."""
        assert self.phase is Phase.FAILED and epoch > self.epoch, f"epoch {self.epoch} is {self.phase.value}"
        self._enter(Phase.WORKING, epoch)

    def closed(self) -> None:
        """The directive that ends the transition is on its way to every rank."""
        assert self.phase in (Phase.ENDED, Phase.FAILED), f"epoch {self.epoch} is {self.phase.value}"
        self._enter(Phase.IDLE, self.epoch)

    def done(self, rank: int, epoch: int, reason: str | None) -> None:
        """A rank's work has ended, well or for a reason; rank 0 says so itself."""
        if epoch != self.epoch or self.phase is not Phase.WORKING:
            self.events.stale += 1
        elif reason is not None:
            self._fail(f"rank {rank}: {reason}")
        else:
            self._hear(rank)
            if self._heard.issuperset({0, *self._others}):
                self.phase = Phase.ENDED

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
        waited = self._clock() - self._since_s
        if self.phase is Phase.PREPARING and waited > self._timeout_s:
            self.events.timed_out += 1
            self.abort(f"no answer from ranks {sorted(set(self._others) - self._heard)} in {self._timeout_s} s")
        elif self.phase is Phase.WORKING and waited > self._work_timeout_s:
            self.events.timed_out += 1
            missing = sorted({0, *self._others} - self._heard)
            self._fail(f"the work of ranks {missing} has not ended in {self._work_timeout_s} s")

    def _handle(self, message: object) -> None:
        match message:
            case Telemetry(rank, _, step, digest):
                self.last_seen[rank] = (step, self._clock())
                if self._digests.get(step, digest) != digest:
                    self.events.disagreements += 1
                    logger.error("rank %d followed other directives than rank 0 up to step %d", rank, step)
            case Done(rank, epoch, reason) if rank in self._others:
                self.done(rank, epoch, reason)
            case Ready(rank, epoch, _) | Refuse(rank, epoch, _, _) if (
                epoch != self.epoch or self.phase not in (Phase.PREPARING, Phase.AGREED) or rank not in self._others
            ):
                self.events.stale += 1
            case Ready(rank, _, _):
                self._hear(rank)
                self._settle()
            case Refuse(rank, _, _, reason):
                self.events.refused += 1
                self.abort(f"rank {rank} refused: {reason}")
            case _:
                self.events.malformed += 1  # only rank 0 sends these

    def _hear(self, rank: int) -> None:
        if rank in self._heard:
            self.events.repeated += 1
        self._heard.add(rank)

    def _settle(self) -> None:
        if self.phase is Phase.PREPARING and self._heard.issuperset(self._others):
            self.phase = Phase.AGREED
            self.events.agreed += 1

    def abort(self, reason: str) -> None:
        """Ends a transition that was not begun; nothing has changed yet."""
        assert self.phase in (Phase.PREPARING, Phase.AGREED), f"epoch {self.epoch} is {self.phase.value}"
        self.phase, self.reason = Phase.IDLE, reason
        self.events.aborted += 1
        logger.warning("transition to epoch %d aborted: %s", self.epoch, reason)
        for rank in self._others:
            self._send(rank, Abort(self.epoch, self._step, reason))

    def _fail(self, reason: str) -> None:
        self.phase, self.reason = Phase.FAILED, reason
        self.events.failed += 1
        logger.warning("transition to epoch %d failed: %s", self.epoch, reason)

    def _enter(self, phase: Phase, epoch: int) -> None:
        self.phase, self.epoch = phase, epoch
        self._heard = set()
        self._since_s = self._clock()

    def note(self, step: int, digest: int) -> None:
        """Remembers rank 0's own digest at `step`, to compare the others' with."""
        self._digests[step] = digest
        while len(self._digests) > 64:
            del self._digests[next(iter(self._digests))]

    def _send(self, rank: int, message: Prepare | Abort) -> None:
        if not self._transport.send(rank, encode_message(message)):
            self.events.unsent += 1
