"""What a policy sees and says: `State` before a decode iteration, `Observation` after it.

A policy chooses one gamma (tokens to draft; 0 = no speculation) for the whole running batch,
once per decode iteration. It is pure: no clock, no global random state, no torch, no SGLang.
The same calls in the same order give the same choices, so a journal can be replayed.
"""

import enum
import math
import operator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class Residency(enum.IntEnum):
    """Where the draft model is. Only `RESIDENT` allows gamma > 0."""

    RESIDENT = 0
    EVICTING = 1
    EVICTED = 2
    RELOADING = 3


class StepKind(enum.IntEnum):
    """What a step computed besides its bookkeeping."""

    DECODE = 0  # every running request: one token at gamma 0, a draft and a verification else
    PREFILL = 1  # new prompts only
    MIXED = 2  # both in one step


class Move(enum.IntEnum):
    """What to do about the draft's residency."""

    STAY = 0
    EVICT = 1
    RELOAD = 2


@dataclass(frozen=True, slots=True)
class State:
    """The server just before a decode iteration.

    Attributes:
        now_s: monotonic time, s.
        batch_size: running requests, at least 1.
        kv_tokens: tokens in the KV cache of the running requests together.
        free_slots: KV slots a new token could take now, cached but unlocked ones included.
        total_slots: KV slots of the pool at its present size.
        queue_length: requests waiting for their prefill.
        queue_blocked: whether the head of the queue waits for lack of KV slots.
        max_lag: largest number of tokens the draft has not seen in any running request.
        residency: where the draft is.
    """

    now_s: float
    batch_size: int
    kv_tokens: int = 0
    free_slots: int = 0
    total_slots: int = 0
    queue_length: int = 0
    queue_blocked: bool = False
    max_lag: int = 0
    residency: Residency = Residency.RESIDENT


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished step.

    Attributes:
        kind: what the step computed.
        batch_size: requests that decoded in it (0 for a step of prefill only).
        gamma: draft tokens per request the step was decided with.
        committed: histogram; `committed[i]` requests committed `i + 1` tokens. Sums to
            `batch_size`; at most `gamma + 1` long. A request's last step may be cut by its
            end, so it is left out of this histogram and counted in `cut_tokens` instead.
        seconds: wall time of the whole step as clients feel it, from the end of the
            previous step: scheduling, drafting, verification, prefill, bookkeeping.
        cut: requests whose commitment was cut by their end (their accept length is unknown).
        cut_tokens: tokens committed by those.
        drafted: requests that really drafted (others were still catching up or opted out);
            -1 means all of them when gamma > 0.
        prefill_tokens: prompt tokens computed in the step.
        kv_tokens: KV length of the decoding requests, summed.
        free_slots, total_slots, queue_length, max_lag, residency: as in `State`, afterwards.
        catchup_tokens: lagging tokens the draft read in this step.
        catchup_seconds: time that took, part of `seconds`.
        draft_seconds: time of the draft's forwards but for that, part of `seconds`; 0 where it is not known.
    """

    kind: StepKind
    batch_size: int
    gamma: int
    committed: tuple[int, ...]
    seconds: float
    cut: int = 0
    cut_tokens: int = 0
    drafted: int = -1
    prefill_tokens: int = 0
    kv_tokens: int = 0
    free_slots: int = 0
    total_slots: int = 0
    queue_length: int = 0
    max_lag: int = 0
    residency: Residency = Residency.RESIDENT
    catchup_tokens: int = 0
    catchup_seconds: float = 0.0
    draft_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens committed by the whole batch."""
        total = self.cut_tokens
        for index, requests in enumerate(self.committed):
            total += (index + 1) * requests
        return total


@dataclass(frozen=True, slots=True)
class Decision:
    """What one iteration shall do.

    Attributes:
        gamma: tokens to draft per request; 0 decodes plainly.
        move: what to do about the draft's residency.
        verify_budget: most draft tokens to verify over the whole batch, those with the
            largest cumulative draft probability first (TETRIS); None verifies all.
        benefit_tokens: what `move` is expected to bring over its horizon, its cost taken off.
    """

    gamma: int
    move: Move = Move.STAY
    verify_budget: int | None = None
    benefit_tokens: float = 0.0


class Policy(Protocol):
    """Chooses gamma; see the module's docstring.

    `decide` is followed by the `observe` of the step it decided; with overlap scheduling,
    observations may arrive one decision late, which is why each carries its own gamma.
    """

    max_gamma: int

    def decide(self, state: State) -> int:
        """Gamma of the coming iteration, 0 .. `max_gamma`; 0 unless the draft is resident."""
        ...

    def observe(self, seen: Observation) -> None:
        """Learns from a finished step. Raises `ValueError` naming a field that cannot be."""
        ...

    def verify_budget(self) -> int | None:
        """Most draft tokens to verify in the iteration just decided, or None for all."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Everything learned and the random state, as JSON-ready values."""
        ...

    def restore(self, saved: dict[str, Any]) -> None:
        """Takes back a `snapshot`; later decisions equal those of the saved policy."""
        ...


@runtime_checkable
class PromptReader(Protocol):
    """A policy that says, while it speculates, whether the draft shall read the prompts about to be prefilled."""

    def reads_prompts(self, state: State) -> bool:
        """`state`: as it will be when those requests decode too. Where the batch will then be too large to
        speculate, reading them is work for nothing; otherwise it saves catching up. Changes nothing."""
        ...


# A step of under a microsecond, of an hour or of a million requests is a broken clock or counter, not an observation.
LEAST_SECONDS = 1e-6
_MOST_SECONDS = 3600.0
_MOST_COUNT = 1 << 40


def check_observation(seen: Observation, max_gamma: int) -> None:
    """Raises `ValueError` naming the first field of `seen` that cannot be, and its value."""
    seconds = seen.seconds
    if not LEAST_SECONDS <= seconds <= _MOST_SECONDS:  # also false for NaN
        raise ValueError(f"observation field seconds is {seconds}; it must be {LEAST_SECONDS} to {_MOST_SECONDS}")
    if not (math.isfinite(seen.catchup_seconds) and 0.0 <= seen.catchup_seconds <= seconds):
        raise ValueError(f"observation field catchup_seconds is {seen.catchup_seconds}; it is a part of {seconds} s")
    if not (math.isfinite(seen.draft_seconds) and 0.0 <= seen.draft_seconds <= seconds):
        raise ValueError(f"observation field draft_seconds is {seen.draft_seconds}; it is a part of {seconds} s")
    if not 0 <= seen.gamma <= max_gamma:
        raise ValueError(f"observation field gamma is {seen.gamma}; arms are 0 to {max_gamma}")
    if len(seen.committed) > seen.gamma + 1:
        raise ValueError(
            f"observation field committed has {len(seen.committed)} entries; gamma {seen.gamma} commits at most "
            f"{seen.gamma + 1} tokens"
        )
    requests = seen.cut
    for count in seen.committed:
        if count < 0:
            raise ValueError(f"observation field committed is {seen.committed}; counts must not be negative")
        requests += count
    if requests != seen.batch_size:
        raise ValueError(
            f"observation field committed counts {requests} requests, cut ones included; batch_size is "
            f"{seen.batch_size}"
        )
    for name, value in zip(_COUNTS, _counts(seen), strict=True):
        if not 0 <= value <= _MOST_COUNT:
            raise ValueError(f"observation field {name} is {value}; it must be 0 to {_MOST_COUNT}")
    if seen.cut_tokens > seen.cut * (seen.gamma + 1):
        raise ValueError(
            f"observation field cut_tokens is {seen.cut_tokens}; {seen.cut} requests at gamma {seen.gamma} commit at "
            f"most {seen.cut * (seen.gamma + 1)}"
        )
    if not -1 <= seen.drafted <= seen.batch_size:
        raise ValueError(f"observation field drafted is {seen.drafted}; it must be -1 to {seen.batch_size}")


_COUNTS = (
    "batch_size",
    "cut",
    "cut_tokens",
    "prefill_tokens",
    "kv_tokens",
    "free_slots",
    "total_slots",
    "catchup_tokens",
    "queue_length",
    "max_lag",
)
_counts = operator.attrgetter(*_COUNTS)
