"""How many tokens a verification commits, learned from every arm at once.

Position i of a chain is accepted with probability p_i given that i - 1 was. One verification at
gamma tells something about every position up to gamma, so each arm teaches all the smaller ones:

    E[tokens | gamma] = 1 + sum over i = 1..gamma of p_1 * ... * p_i
"""

import math
from collections.abc import Sequence
from typing import Any

from sglang_nightjar.policy.base import Observation

_PRIOR = 0.7  # p before anything is seen
_PRIOR_TRIALS = 4.0  # and how many trials that belief is worth
_WINDOW = 20000.0  # trials a position remembers, so that slow drift is followed
_STEPS_WINDOW = 2000.0  # and, at large batches, no more than about this many steps of them

# CUSUM over the standardized surprise of each step (Page 1954): shifts below `_SLACK` standard
# deviations are noise, and about a million undisturbed steps pass between two false alarms.
_SLACK = 0.5
_ALARM = 12.0
_KEPT_ON_ALARM = 0.02  # share of the old trials that survive a detected change

_REFRESH_AT = 0.125  # share of the trials that must be new before the counts are looked at again, where nobody asks


class Acceptance:
    """Discounted success counts per chain position, with change detection.

    Attributes:
        changes: how often the acceptance was found to have changed.
    """

    def __init__(self, max_gamma: int) -> None:
        self._trials = [0.0] * max_gamma
        self._successes = [0.0] * max_gamma
        self._up = self._down = 0.0
        self.changes = 0
        self._refresh()

    def observe(self, gamma: int, committed: Sequence[int]) -> bool:
        """Learns from one verification.

        Args:
            gamma: tokens drafted per request, above 0.
            committed: `committed[i]` requests committed `i + 1` tokens; requests cut by their end excluded.
        Returns:
            True if this step made it clear that the acceptance has changed.
        """
        requests = 0
        accepted = 0
        for index, count in enumerate(committed):
            requests += count
            accepted += index * count
        if requests == 0:
            return False
        alarm = self._surprise(gamma, requests, accepted)
        if alarm:
            self._forget()
        reached = requests  # requests whose position `index + 1` was tested
        for index in range(gamma):
            if reached == 0:
                break
            passed = reached - (committed[index] if index < len(committed) else 0)
            fade = reached / _WINDOW
            keep = 1.0 - (fade if fade > 1.0 / _STEPS_WINDOW else 1.0 / _STEPS_WINDOW)
            if keep < 0.5:
                keep = 0.5
            self._trials[index] = self._trials[index] * keep + reached
            self._successes[index] = self._successes[index] * keep + passed
            reached = passed
        self._stale += requests
        if alarm or self._stale > _REFRESH_AT * self._trials[0]:
            self._refresh()
        return alarm

    def _surprise(self, gamma: int, requests: int, accepted: int) -> bool:
        """Feeds the CUSUM with how far this step's accepted drafts are from what was expected."""
        if self._trials[0] < 30.0:
            return False
        mean = self._expected[gamma] - 1.0
        # Of a count of leading successes: E[n^2] = sum over i of (2 i - 1) P(n >= i).
        square = 0.0
        reach = 1.0
        for index in range(gamma):
            reach *= self._p[index]
            square += (2 * index + 1) * reach
        spread = math.sqrt(max(square - mean * mean, 0.05) * requests)
        z = max(-4.0, min(4.0, (accepted - requests * mean) / spread))
        self._up = max(0.0, self._up + z - _SLACK)
        self._down = max(0.0, self._down - z - _SLACK)
        return self._up > _ALARM or self._down > _ALARM

    def _forget(self) -> None:
        self.changes += 1
        self._up = self._down = 0.0
        self._trials = [value * _KEPT_ON_ALARM for value in self._trials]
        self._successes = [value * _KEPT_ON_ALARM for value in self._successes]

    def _refresh(self) -> None:
        """Recomputes p, E and its error; a position never tried leans on the one before it."""
        self._stale = 0  # trials of the first position not yet in them
        belief = _PRIOR
        self._p: list[float] = []
        self._expected = [1.0]
        self._error = [0.0]
        reach, expected, variance = 1.0, 1.0, 0.0
        for trials, successes in zip(self._trials, self._successes, strict=True):
            belief = (successes + _PRIOR_TRIALS * belief) / (trials + _PRIOR_TRIALS)
            self._p.append(belief)
            reach *= belief
            expected += reach
            # dE/dp_i is at most (the tail of the sum) / p_i; first order, positions independent.
            variance += reach * reach * (1.0 - belief) / max(belief, 0.05) / (trials + _PRIOR_TRIALS)
            self._expected.append(expected)
            self._error.append(math.sqrt(variance) / expected)

    def expected_tokens(self, gamma: int) -> float:
        """Tokens a request commits in one step at `gamma`, 1.0 at gamma 0."""
        if self._stale:
            self._refresh()
        return self._expected[gamma]

    def relative_error(self, gamma: int) -> float:
        """Standard error of `expected_tokens(gamma)`, relative to it."""
        if self._stale:
            self._refresh()
        return self._error[gamma]

    @property
    def by_position(self) -> list[float]:
        """p_1 .. p_max."""
        if self._stale:
            self._refresh()
        return list(self._p)

    def snapshot(self) -> dict[str, Any]:
        return {
            "trials": list(self._trials),
            "successes": list(self._successes),
            "cusum": [self._up, self._down],
            "changes": self.changes,
            "stale": self._stale,
            "values": [list(self._p), list(self._expected), list(self._error)],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self._trials = [float(value) for value in saved["trials"]]
        self._successes = [float(value) for value in saved["successes"]]
        self._up, self._down = (float(value) for value in saved["cusum"])
        self.changes = int(saved["changes"])
        self._stale = int(saved["stale"])
        self._p, self._expected, self._error = ([float(value) for value in values] for values in saved["values"])


def drafting_requests(seen: Observation) -> list[int]:
    """Histogram over the requests that drafted: entry `i` counts those with `i` drafts accepted.

    A committed run is the accepted drafts and one token of the target's. Requests cut by
    their end are absent from `committed`. Those that did not draft (`drafted` below
    `batch_size`) each committed one token, so they are taken out of entry 0; of the cut
    requests it is not known which drafted, so entry 0 may come out too small by as many.
    """
    accepted = list(seen.committed)
    if accepted and 0 <= seen.drafted < seen.batch_size:
        accepted[0] = max(0, accepted[0] - (seen.batch_size - seen.drafted))
    return accepted
