"""A synthetic server for the tests of the baseline policies: known step times, known acceptance."""

import json
import random
from collections.abc import Callable
from typing import Any

from sglang_nightjar.policy.base import Observation, Policy, Residency, State, StepKind


def observation(gamma: int, committed: tuple[int, ...], seconds: float = 0.03, **fields: Any) -> Observation:
    batch_size = sum(committed) + fields.get("cut", 0)
    kind = fields.pop("kind", StepKind.DECODE)
    return Observation(kind, batch_size, gamma, committed, seconds, **fields)


class World:
    """Each draft is accepted with probability `acceptance` until the first rejection."""

    def __init__(self, acceptance: float, *, draft_s: float, token_s: float = 2e-5, noise: float = 0.0) -> None:
        self.acceptance = acceptance
        self.draft_s = draft_s
        self.token_s = token_s
        self.noise = noise
        self.random = random.Random(7)

    def seconds(self, batch_size: int, kv_tokens: int, gamma: int) -> float:
        target = 0.02 + 2e-8 * kv_tokens + self.token_s * batch_size * (gamma + 1)
        return target + gamma * self.draft_s

    def goodput(self, batch_size: int, kv_tokens: int, gamma: int) -> float:
        tokens = sum(self.acceptance**i for i in range(gamma + 1))
        return batch_size * tokens / self.seconds(batch_size, kv_tokens, gamma)

    def best(self, batch_size: int, kv_tokens: int, max_gamma: int) -> int:
        return max(range(max_gamma + 1), key=lambda gamma: self.goodput(batch_size, kv_tokens, gamma))

    def step(self, state: State, gamma: int) -> Observation:
        committed = [0] * (gamma + 1)
        for _ in range(state.batch_size):
            run = 0
            while run < gamma and self.random.random() < self.acceptance:
                run += 1
            committed[run] += 1
        seconds = self.seconds(state.batch_size, state.kv_tokens, gamma)
        seconds *= 1.0 + self.noise * (2.0 * self.random.random() - 1.0)
        return observation(gamma, tuple(committed), seconds, kv_tokens=state.kv_tokens)


def run(policy: Policy, world: World, states: list[State]) -> list[int]:
    """Decides and observes every state in turn; the gammas decided."""
    decided = []
    for state in states:
        decided.append(policy.decide(state))
        policy.observe(world.step(state, decided[-1]))
    return decided


def states(steps: int, batch_size: int = 8, residency: Residency = Residency.RESIDENT, seed: int = 3) -> list[State]:
    """Batches of `batch_size` with contexts of 200 to 800 tokens a request."""
    draw = random.Random(seed)
    return [
        State(0.03 * step, batch_size, kv_tokens=batch_size * draw.randint(200, 800), residency=residency)
        for step in range(steps)
    ]


def assert_replays(make: Callable[[], Policy], world: World, before: list[State], after: list[State]) -> None:
    """A policy restored from a snapshot that went through JSON decides as the one it was taken of."""
    policy = make()
    run(policy, world, before)
    restored = make()
    restored.restore(json.loads(json.dumps(policy.snapshot())))
    assert restored.snapshot() == policy.snapshot()
    kept = world.random.getstate()
    decided = run(policy, world, after)
    world.random.setstate(kept)
    assert run(restored, world, after) == decided
    assert restored.snapshot() == policy.snapshot()
