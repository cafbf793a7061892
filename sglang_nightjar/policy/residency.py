"""When the draft leaves the device and when it comes back.

Evict: KV slots are short (free share below `tau_low`, or a request waits for slots), for `persist`
decisions in a row, and a larger batch without speculation decodes faster than the present one does:
faster than plain decoding where speculation is worthless at this batch, and by a wider margin than
speculating where that pays (where memory keeps the batch small, off at this batch is not what
speculation has to be compared with). The draft's weights and KV then become KV slots. Reload: nothing
waits, what is in use fits the smaller pool with a margin, and speculation would pay, again for
`persist` decisions in a row. Either way the expected benefit, in tokens over the coming `horizon_s`
seconds and less what the move costs, must be positive. `settle_s` must have passed since the last
move, and `cooldown_s` since the last eviction before the next one.

Source: arXiv 2512.22420, elastic memory (tau_low about 10 % of the pool was its best plateau).
"""

from dataclasses import dataclass
from typing import Any, Protocol

from sglang_nightjar.policy.base import Move, Residency, State


class Estimates(Protocol):
    """What a policy must be able to say for residency to be decided by expected benefit."""

    def gain(self, state: State) -> float:
        """Tokens/s that speculation would add; negative where it costs."""
        ...

    def plain_rate(self, batch_size: int, kv_tokens: int) -> float:
        """Tokens/s without speculation."""
        ...

    def larger_rate(self, requests: int, state: State) -> float:
        """Tokens/s without speculation, at the least, of `requests` running instead of the present ones."""
        ...

    def catchup_s(self, lag: int, batch_size: int) -> float:
        """Seconds until the draft has read `lag` tokens of each request."""
        ...


@dataclass(frozen=True, slots=True)
class ResidencyCosts:
    """What the two pools hold and what moving between them takes.

    Attributes:
        slots_resident, slots_evicted: KV slots with the draft on the device, and without it.
        pause_s: how long decoding stops for a move (relocation of live slots included).
        reload_s: the draft's weights from host memory; decoding goes on meanwhile.
    """

    slots_resident: int
    slots_evicted: int
    pause_s: float
    reload_s: float

    def __post_init__(self) -> None:
        if not 0 < self.slots_resident <= self.slots_evicted:
            raise ValueError(
                f"slots_resident is {self.slots_resident} and slots_evicted {self.slots_evicted}; the pool without "
                "the draft must be at least as large, and neither empty"
            )
        for name in ("pause_s", "reload_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, slots=True)
class ResidencySettings:
    """Constants of the decision; see the module's docstring.

    Attributes:
        tau_low: share of the pool's slots below which memory counts as short.
        persist: decisions in a row for which a condition must hold.
        cooldown_s: least time between two evictions. settle_s: least time between two moves.
        horizon_s: time over which a move's benefit is counted.
        margin: share of the smaller pool that must stay free after a reload; above `tau_low`, or
            the next moment would find memory short again.
        least_gain: share of throughput that more room must add. Where the device computes at its
            limit a larger batch adds next to nothing and makes every request slower.
        least_gain_over_drafts: the same where speculation pays, since what is known then gives way to what is
            only estimated.
    """

    tau_low: float = 0.10
    persist: int = 32
    cooldown_s: float = 30.0
    settle_s: float = 5.0
    horizon_s: float = 15.0
    margin: float = 0.20
    least_gain: float = 0.05
    least_gain_over_drafts: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 < self.tau_low < self.margin < 1.0:
            raise ValueError(
                f"tau_low is {self.tau_low} and margin {self.margin}; they must be in (0, 1), tau_low the smaller"
            )
        if self.persist < 1:
            raise ValueError(f"persist is {self.persist}; it must be at least 1")
        for name in ("cooldown_s", "settle_s", "horizon_s", "least_gain", "least_gain_over_drafts"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


class ResidencyPlanner:
    """Decides moves; asks `estimates` what they would bring.

    Attributes:
        benefit_tokens: expected benefit of the last move decided.
    """

    def __init__(self, estimates: Estimates, costs: ResidencyCosts, settings: ResidencySettings | None = None) -> None:
        self._estimates = estimates
        self._costs = costs
        self._settings = settings or ResidencySettings()
        self._streak = 0  # decisions in a row for which the condition of the present residency held
        self._moved_s = self._evicted_s = float("-inf")
        self.benefit_tokens = 0.0

    def decide(self, state: State) -> Move:
        """What to do about the draft."""
        if state.residency is Residency.RESIDENT:
            wanted, move = self._short(state), Move.EVICT
        elif state.residency is Residency.EVICTED:
            wanted, move = self._roomy(state), Move.RELOAD
        else:
            wanted, move = False, Move.STAY
        self._streak = self._streak + 1 if wanted else 0
        settings = self._settings
        if self._streak < settings.persist or state.now_s - self._moved_s < settings.settle_s:
            return Move.STAY
        if move is Move.EVICT and state.now_s - self._evicted_s < settings.cooldown_s:
            return Move.STAY
        benefit = self._evict_benefit(state) if move is Move.EVICT else self._reload_benefit(state)
        self._streak = 0  # also where there is no benefit: ask again after as many decisions
        if benefit <= 0.0:
            return Move.STAY
        self._moved_s = state.now_s
        if move is Move.EVICT:
            self._evicted_s = state.now_s
        self.benefit_tokens = benefit
        return move

    def _short(self, state: State) -> bool:
        return state.queue_blocked or state.free_slots < self._settings.tau_low * state.total_slots

    def _roomy(self, state: State) -> bool:
        used = state.total_slots - state.free_slots
        return state.queue_length == 0 and used <= (1.0 - self._settings.margin) * self._costs.slots_resident

    def _evict_benefit(self, state: State) -> float:
        """Tokens from more requests at once without speculation, less the pauses of leaving and of coming back."""
        gain = self._estimates.gain(state)
        rate = self._estimates.plain_rate(state.batch_size, state.kv_tokens) + max(gain, 0.0)
        growth = self._costs.slots_evicted / self._costs.slots_resident
        # More requests only help as far as there are more: those that wait, and what the running ones still need.
        larger = min(int(state.batch_size * growth), state.batch_size + max(state.queue_length, 1))
        added = self._estimates.larger_rate(larger, state) - rate
        least = self._settings.least_gain_over_drafts if gain > 0.0 else self._settings.least_gain
        if added < least * rate:
            return 0.0
        return added * self._settings.horizon_s - rate * 2.0 * self._costs.pause_s

    def _reload_benefit(self, state: State) -> float:
        """Tokens from speculating, from when the draft is back and has caught up with everything."""
        rate = self._estimates.plain_rate(state.batch_size, state.kv_tokens)
        catchup_s = self._estimates.catchup_s(max(state.kv_tokens // state.batch_size, 1), state.batch_size)
        useful_s = max(self._settings.horizon_s - self._costs.reload_s, 0.0)
        return self._estimates.gain(state) * useful_s - rate * (self._costs.pause_s + catchup_s)

    def snapshot(self) -> dict[str, Any]:
        times = [None if at == float("-inf") else at for at in (self._moved_s, self._evicted_s)]
        return {"streak": self._streak, "times": times, "benefit_tokens": self.benefit_tokens}

    def restore(self, saved: dict[str, Any]) -> None:
        self._streak = int(saved["streak"])
        self._moved_s, self._evicted_s = (float("-inf") if at is None else float(at) for at in saved["times"])
        self.benefit_tokens = float(saved["benefit_tokens"])
