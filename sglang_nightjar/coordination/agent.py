"""The side of every rank but 0: answers whether it can, forgets what is aborted, tells where it is."""

from collections.abc import Callable

import msgspec

from sglang_nightjar.coordination.messages import (
    Abort,
    Done,
    Prepare,
    Ready,
    Refuse,
    Telemetry,
    decode_message,
    encode_message,
)
from sglang_nightjar.coordination.transport import Transport

_REPEAT_EVERY = 64  # polls, one per scheduler iteration


class Agent:
    """One rank's.

    Attributes:
        prepared: the transition this rank said it can make, until it is committed or aborted.
        strange: messages that were none of rank 0's, or came too late.
        unsent: answers that could not be queued.
    """

    def __init__(self, transport: Transport, rank: int, can: Callable[[Prepare], str | None]) -> None:
        """`can`: prepares a transition and returns None, or the reason why it cannot be made."""
        self._transport = transport
        self._rank = rank
        self._can = can
        self._ended = 0  # the newest epoch that was aborted or committed
        self._newest = 0  # the newest epoch asked for
        self._reason: str | None = None  # why it was refused, if it was
        self._done: Done | None = None  # said again now and then until the transition is over
        self._polls = 0
        self.prepared: Prepare | None = None
        self.strange = 0
        self.unsent = 0

    def answer_with(self, can: Callable[[Prepare], str | None]) -> None:
        """Answers from now on by `can`."""
        self._can = can

    def poll(self) -> None:
        """Reads what has arrived and answers. Never waits."""
        self._polls += 1
        if self._done is not None and self._polls % _REPEAT_EVERY == 0:
            self._send(self._done)
        for data in self._transport.receive():
            try:
                message = decode_message(data)
            except msgspec.DecodeError:
                self.strange += 1
                continue
            match message:
                case Prepare(epoch, _, _) if epoch <= self._ended or epoch < self._newest:
                    self.strange += 1  # overtaken: answering it would drop what was prepared since
                case Prepare():
                    self._answer(message)
                case Abort(epoch, _, _):
                    self._end(epoch)
                case _:
                    self.strange += 1

    def _answer(self, asked: Prepare) -> None:
        """Decides once per epoch; a repeated question gets the same answer."""
        if asked.epoch != self._newest:
            self._newest = asked.epoch
            self._reason = self._can(asked)
            self.prepared = asked if self._reason is None else None
        if self._reason is None:
            self._send(Ready(self._rank, asked.epoch, asked.step))
        else:
            self._send(Refuse(self._rank, asked.epoch, asked.step, self._reason))

    def commit(self, epoch: int) -> Prepare | None:
        """A directive began `epoch`: what this rank had prepared for it, or None where it had not."""
        prepared = self.prepared if self.prepared is not None and self.prepared.epoch == epoch else None
        self._end(epoch)
        return prepared

    def done(self, epoch: int, reason: str | None) -> None:
        """This rank's work of the transition has ended, well or for a reason."""
        self._done = Done(self._rank, epoch, reason)
        self._send(self._done)

    def over(self) -> None:
        """The transition has ended or is undone: its end need not be told any more."""
        self._done = None

    def tell(self, epoch: int, step: int, digest: int) -> None:
        """Sends where this rank is."""
        self._send(Telemetry(self._rank, epoch, step, digest))

    def _end(self, epoch: int) -> None:
        self._ended = max(self._ended, epoch)
        if self.prepared is not None and self.prepared.epoch <= epoch:
            self.prepared = None

    def _send(self, message: Ready | Refuse | Done | Telemetry) -> None:
        if not self._transport.send(0, encode_message(message)):
            self.unsent += 1
