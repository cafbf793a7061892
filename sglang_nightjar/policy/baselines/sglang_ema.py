"""SGLang's own adaptive speculation: an average of the accept length against thresholds."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

from sglang_nightjar.policy.acceptance import drafting_requests
from sglang_nightjar.policy.base import Observation, Residency, State, StepKind, check_observation


@dataclass(frozen=True, slots=True)
class Tier:
    """The choice for batches from `least_batch` up to the next tier's.

    Attributes:
        least_batch: smallest batch size, requests; the first tier also takes smaller ones.
        candidates: gammas to choose from.
        up_margin: added to the accept length needed to draft more, tokens.
        down_margin: added to the accept length at which to draft less, tokens.
        ceiling: gamma, unless it is rising, is at most `ceil(ceiling * mean accept length)`; 0 is off.
    """

    least_batch: int
    candidates: tuple[int, ...]
    up_margin: float = 0.0
    down_margin: float = -0.25
    ceiling: float = 0.0


@dataclass(frozen=True, slots=True)
class SglangEmaConfig:
    """SGLang 0.5.23's defaults.

    Attributes:
        tiers: by batch size.
        initial_gamma: `--speculative-num-steps`; a tier without it starts at its middle candidate.
        weight: of the newest step in the moving average.
        warmup_steps: steps of a tier before its first change.
        update_interval: steps of a tier between changes.
        graph_batch_sizes: batch sizes with a CUDA graph; a batch counts as the next larger one.
    """

    tiers: tuple[Tier, ...] = (
        Tier(1, (1, 3, 5, 7)),
        Tier(8, (0, 1, 3), down_margin=0.0),
        Tier(32, (0, 1), down_margin=0.0),
        Tier(64, (0,), down_margin=0.0),
    )
    initial_gamma: int = 3
    weight: float = 0.2
    warmup_steps: int = 10
    update_interval: int = 5
    graph_batch_sizes: tuple[int, ...] = ()


class _Slot:
    """One tier's gamma and what it has seen."""

    def __init__(self, tier: Tier, config: SglangEmaConfig, max_gamma: int) -> None:
        self.tier = tier
        self.config = config
        self.candidates = sorted({c for c in tier.candidates if c <= max_gamma}) or [max_gamma]
        start = config.initial_gamma
        self.gamma = start if start in self.candidates else self.candidates[len(self.candidates) // 2]
        # Neither threshold is crossed at one less than gamma, so it holds until something is seen.
        self.mean_accepted = float(self.gamma - 1)
        self.steps = 0

    def learn(self, mean_accepted: float | None) -> None:
        """Counts a step; `mean_accepted` is its accept length (tokens per request), None if it drafted none."""
        if mean_accepted is not None and self.gamma > 0:
            self.mean_accepted += self.config.weight * (mean_accepted - self.mean_accepted)
        self.steps += 1
        since_warmup = self.steps - self.config.warmup_steps
        if since_warmup > 0 and since_warmup % self.config.update_interval == 0:
            self.gamma = self.candidates[self._next()]

    def _next(self) -> int:
        """Index of the candidate to use from here on."""
        candidates, mean = self.candidates, self.mean_accepted
        now = candidates.index(self.gamma)
        top = len(candidates) - 1
        if self.gamma == 0:
            # No accept length is seen at gamma 0, so the smallest candidate is tried again.
            probe = min(now + 1, top)
            if mean < 0:  # this tier has never drafted
                self.mean_accepted = float(candidates[probe] - 1)
            return probe
        index = now
        while index > 0 and mean <= max(candidates[index - 1] - 0.5, 0.5) + self.tier.down_margin:
            index -= 1
        if index == now:
            while index < top and mean > candidates[index] - 0.5 + self.tier.up_margin:
                index += 1
        if self.tier.ceiling > 0 and index <= now:
            most = max(1, math.ceil(mean * self.tier.ceiling))
            while index > 0 and candidates[index] > most:
                index -= 1
        return index


class SglangEma:
    """Gamma follows a moving average of the accept length, with hysteresis, apart per batch size.

    Source: SGLang 0.5.23, `--speculative-adaptive` (`speculative/adaptive_spec_params.py`).
    Per tier, `m` is the mean of accepted drafts per request, in tokens; after a step with
    mean `a`, `m <- m + weight * (a - m)`. Every `update_interval` steps after the warm-up:

        down to candidate c while m <= max(c - 0.5, 0.5) + down_margin; else
        up from candidate c while m > c - 0.5 + up_margin.

    From gamma 0 it always goes up one candidate at the next update, as nothing is seen there.

    Deviations: candidates above `max_gamma` are dropped (`max_gamma` where none is left);
    SGLang has EAGLE alone do this, here it drives whatever drafts. A step forced to gamma 0
    is not counted, as SGLang has none; requests cut by their end or not drafting are left
    out of the mean, where SGLang has no requests that opt out. SGLang's batches of prefill
    never reach its controller, nor do they here; a mixed step counts for its decoding part.
    """

    def __init__(self, max_gamma: int, config: SglangEmaConfig | None = None) -> None:
        self.max_gamma = max_gamma
        self.config = config or SglangEmaConfig()
        tiers = sorted(self.config.tiers, key=lambda tier: tier.least_batch)
        if max_gamma < 0:
            raise ValueError(f"max_gamma is {max_gamma}; it must not be negative")
        if not tiers or any(not tier.candidates or min(tier.candidates) < 0 for tier in tiers):
            raise ValueError("tiers must not be empty, and each needs candidates that are not negative")
        self._graphs = sorted(self.config.graph_batch_sizes)
        self._least = [tier.least_batch for tier in tiers]
        self._slots = [_Slot(tier, self.config, max_gamma) for tier in tiers]

    def _slot(self, batch_size: int) -> _Slot:
        graph = bisect_left(self._graphs, batch_size)
        if graph < len(self._graphs):
            batch_size = self._graphs[graph]
        return self._slots[max(0, bisect_right(self._least, batch_size) - 1)]

    def candidates(self, batch_size: int) -> tuple[int, ...]:
        """The gammas it chooses from with `batch_size` requests running."""
        return tuple(self._slot(batch_size).candidates)

    def decide(self, state: State) -> int:
        return self._slot(state.batch_size).gamma if state.residency is Residency.RESIDENT else 0

    def observe(self, seen: Observation) -> None:
        check_observation(seen, self.max_gamma)
        if seen.kind is StepKind.PREFILL:
            return
        slot = self._slot(seen.batch_size)
        if seen.gamma == 0:
            if slot.gamma == 0 and seen.committed:
                slot.learn(None)
            return
        accepted = drafting_requests(seen)
        requests = sum(accepted)
        if requests > 0:
            slot.learn(sum(i * count for i, count in enumerate(accepted)) / requests)

    def verify_budget(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {"slots": [[slot.gamma, slot.mean_accepted, slot.steps] for slot in self._slots]}

    def restore(self, saved: dict[str, Any]) -> None:
        for slot, (gamma, mean_accepted, steps) in zip(self._slots, saved["slots"], strict=True):
            slot.gamma, slot.mean_accepted, slot.steps = int(gamma), float(mean_accepted), int(steps)
