"""A synthetic server for the tests of the policies: known step times, known acceptance."""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Played:
    """One step of `play`: when it began, its gamma and its seconds, catch-up included."""

    now_s: float
    gamma: int
    seconds: float


def play(
    policy: Policy, world: World, batches: Iterable[int], *, context: int = 400, start_s: float = 0.0, late: int = 0
) -> list[Played]:
    """Like `run`, with a clock that the steps move and a draft that lags while it is off.

    Args:
        context: KV tokens of each request.
        start_s: the clock at the first step.
        late: how many decisions late observations arrive.
    """
    played: list[Played] = []
    waiting: list[Observation] = []
    now_s, lag = start_s, 0
    for batch_size in batches:
        state = State(now_s, batch_size, batch_size * context, max_lag=lag)
        gamma = policy.decide(state)
        seen = world.step(state, gamma)
        if gamma == 0:
            lag = min(lag + 1, context)
        elif lag:
            catchup_s = 0.002 + 2e-6 * lag * batch_size
            seen = replace(
                seen, seconds=seen.seconds + catchup_s, catchup_seconds=catchup_s, catchup_tokens=lag * batch_size
            )
            lag = 0
        waiting.append(seen)
        if len(waiting) > late:
            policy.observe(waiting.pop(0))
        played.append(Played(now_s, gamma, seen.seconds))
        now_s += seen.seconds
    return played


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


NAN, INF = float("nan"), float("inf")

# What no server can have seen, of policies with 3 arms above 0: (the field an error must name, the observation).
BAD_OBSERVATIONS: list[tuple[str, Observation]] = [
    *(("seconds", observation(1, (2, 2), value)) for value in (NAN, INF, -INF, 0.0, -0.03, 1e-9, 5e-324, 1e9)),
    *(("catchup_seconds", observation(1, (2, 2), catchup_seconds=value)) for value in (NAN, INF, -1e-3, 0.031)),
    *(("gamma", observation(value, ())) for value in (-1, 4, 1 << 70)),
    ("committed", observation(1, (1, 1, 1))),  # three tokens of gamma 1
    ("committed", observation(1, (5, -1))),
    ("committed", replace(observation(1, (2, 2)), batch_size=5)),
    ("committed", replace(observation(1, (2, 2)), batch_size=-4)),
    ("committed", replace(observation(1, (2, 2)), cut=3)),
    ("committed", observation(1, (NAN, 2))),  # type: ignore[arg-type]
    ("batch_size", observation(1, (1 << 60,))),
    ("cut", observation(1, (3, 2), cut=-1)),
    ("cut_tokens", observation(1, (2, 2), cut=1, cut_tokens=3)),  # gamma 1 commits at most 2
    ("cut_tokens", observation(1, (2, 2), cut_tokens=1)),  # nothing was cut
    ("cut_tokens", observation(1, (2, 2), cut=1, cut_tokens=-1)),
    ("drafted", observation(1, (2, 2), drafted=5)),
    ("drafted", observation(1, (2, 2), drafted=-2)),
    *(
        (name, observation(1, (2, 2), **{name: value}))
        for name in (
            "prefill_tokens",
            "kv_tokens",
            "free_slots",
            "total_slots",
            "queue_length",
            "max_lag",
            "catchup_tokens",
        )
        for value in (NAN, INF, -1, 1 << 60)
    ),
]
