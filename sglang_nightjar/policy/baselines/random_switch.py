"""`random`: switches to a random gamma every few steps. For tests: any sequence of gammas must be lossless."""

import random
from typing import Any

from sglang_nightjar.policy.base import Observation, Residency, State, check_observation
from sglang_nightjar.policy.random_state import load_random, save_random


class RandomSwitch:
    """Holds each gamma, uniform over 0 .. `max_gamma`, for 1 to `longest` steps."""

    def __init__(self, max_gamma: int, seed: int = 0, longest: int = 4) -> None:
        self.max_gamma = max_gamma
        self._longest = longest
        self._random = random.Random(seed)
        self._gamma = 0
        self._left = 0

    def decide(self, state: State) -> int:
        if self._left == 0:
            self._gamma = self._random.randint(0, self.max_gamma)
            self._left = self._random.randint(1, self._longest)
        self._left -= 1
        return self._gamma if state.residency is Residency.RESIDENT else 0

    def reads_prompts(self, state: State) -> bool:
        """Of every other prompt or so."""
        return state.kv_tokens % 2 == 0

    def observe(self, seen: Observation) -> None:
        check_observation(seen, self.max_gamma)

    def verify_budget(self) -> int | None:
        return None

    def snapshot(self) -> dict[str, Any]:
        return {"random": save_random(self._random), "gamma": self._gamma, "left": self._left}

    def restore(self, saved: dict[str, Any]) -> None:
        load_random(self._random, saved["random"])
        self._gamma, self._left = int(saved["gamma"]), int(saved["left"])
