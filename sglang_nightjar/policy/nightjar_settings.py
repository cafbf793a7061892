"""Constants of the `nightjar` planner."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NightjarSettings:
    """Constants of the planner.

    Attributes:
        tpot_slo_s: seconds per output token of a request that users accept; None: no limit.
        first_gamma: arm played before anything is known, after gamma 0.
        trials: steps each of these two is played at the start.
        horizon: steps over which the cost of switching on is spread.
        margin: relative gain below which speculation is neither switched on nor off.
        dwell_s: least time between two switches between off and on,
        urgent: unless the switch gains more than this share (the load has moved far).
        probe_share: share of the time that probing while off may cost.
        probe_steps: steps of one probe.
        longest_bin: decisions an arm stays locked at most, so that the planner can react.
        caution: how many standard errors an arm is given the benefit of, to count as plausible.
        known: steps that the best arm must have had at a batch size before others are tried against it there.
    """

    tpot_slo_s: float | None = None
    first_gamma: int = 3
    trials: int = 2
    horizon: int = 128
    margin: float = 0.015
    dwell_s: float = 1.0
    urgent: float = 0.15
    probe_share: float = 0.01
    probe_steps: int = 6
    longest_bin: int = 32
    caution: float = 1.0
    known: int = 16

    def __post_init__(self) -> None:
        if self.tpot_slo_s is not None and not self.tpot_slo_s > 0:
            raise ValueError(f"tpot_slo_s is {self.tpot_slo_s}; it must be positive, or None for no limit")
        for name in ("trials", "horizon", "probe_steps", "longest_bin"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("margin", "dwell_s", "urgent", "probe_share", "caution", "known"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
