"""What rank 0 tells every rank, in the broadcast of requests that all of them receive in lockstep.

Encoded with msgspec, never pickled by us. A message on that channel cannot be lost on one rank
alone, so whatever it says takes effect at the same step everywhere.
"""

import enum

import msgspec

_MAGIC = b"NJ1"  # tells a directive from whatever else travels in the broadcast


class Turn(enum.IntEnum):
    """A step of a memory transition, made by every rank when the directive that carries it is applied."""

    NONE = 0
    EVICT = 1  # the draft leaves; also the way back from a reload that failed
    EVICTED = 2  # it has left everywhere: the pool has `slots` from now on
    RELOAD = 3  # the draft returns; also the way back from an eviction that failed
    RESIDENT = 4  # it is back everywhere

    @property
    def begins(self) -> bool:
        """Whether work in the background follows, whose end every rank reports."""
        return self in (Turn.EVICT, Turn.RELOAD)


class Directive(msgspec.Struct, frozen=True, array_like=True):
    """How the coming decode steps are run, until the next directive.

    Attributes:
        epoch: of the last memory transition that was begun, from 1; 0 before the first.
        step: number of this directive, from 1.
        gamma: tokens to draft per request; 0 decodes plainly.
        catchup_tokens: most lagging tokens the draft may read in a step.
        verify_budget: most draft tokens to verify over the batch, or None for all.
        turn: of a memory transition. slots: of the KV pool after `Turn.EVICTED`.
        keep_cached: whether `Turn.RELOAD` moves cached prefixes rather than drop them.
        read_prompts: whether the draft reads the prompts prefilled under this directive (never at gamma 0).
    """

    epoch: int
    step: int
    gamma: int
    catchup_tokens: int
    verify_budget: int | None = None
    turn: Turn = Turn.NONE
    slots: int = 0
    keep_cached: bool = False
    read_prompts: bool = True


_DECODER = msgspec.msgpack.Decoder(Directive)


def encode(directive: Directive) -> bytes:
    """The directive as bytes."""
    return _MAGIC + msgspec.msgpack.encode(directive)


def is_directive(item: object) -> bool:
    """Whether a broadcast item is one of ours."""
    return isinstance(item, bytes) and item.startswith(_MAGIC)


def decode(item: bytes) -> Directive:
    """The directive; `msgspec.ValidationError` where the bytes are none."""
    return _DECODER.decode(item[len(_MAGIC) :])


class Telemetry(msgspec.Struct, frozen=True, array_like=True, tag="telemetry"):
    """A rank tells where it is. `digest`: of every directive so far, equal on all ranks at the same step."""

    rank: int
    epoch: int
    step: int
    digest: int


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Rank 0 asks whether a rank can make the transition that begins with `turn` and epoch `epoch`."""

    epoch: int
    step: int
    turn: Turn


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A rank can."""

    rank: int
    epoch: int
    step: int


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """A rank cannot, and says why."""

    rank: int
    epoch: int
    step: int
    reason: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """A rank's background work of a transition has ended: well, or for the `reason` it failed."""

    rank: int
    epoch: int
    reason: str | None


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The transition to `epoch` will not be made: forget what was prepared for it."""

    epoch: int
    step: int
    reason: str


Message = Telemetry | Prepare | Ready | Refuse | Done | Abort
_MESSAGES = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """An asynchronous message as bytes."""
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes) -> Message:
    """The message; `msgspec.DecodeError` (or its `ValidationError`) where the bytes are none of ours."""
    return _MESSAGES.decode(data)
