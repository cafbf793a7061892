"""What would another policy have done? Replays a server's journal under it.

The journal gives the states the server met and what its steps cost. From its steps the planner's
own `CostModel` learns the server's costs and acceptance; then each policy meets the recorded states
in order, and its steps take the time and commit the tokens the estimates say. Each step is charged
the time the policy takes per token, times the tokens the server committed in it, so all policies do
the same work. Batch sizes stay as recorded: a faster policy would have emptied the batch sooner,
which is not modelled.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_nightjar.errors import UserError
from sglang_nightjar.observe.journal import read_journal
from sglang_nightjar.policy.base import Observation, Residency, State, StepKind
from sglang_nightjar.policy.cost_model import CostModel
from sglang_nightjar.policy.registry import PolicyOptions, make_policy, parse_policy

_LEAST_STEPS = 50  # a shorter journal says too little about costs
_CHECKED = 3  # times the steps are learned, so that early ones are judged by what came later


@dataclass(frozen=True)
class Replayed:
    """What one policy would have done.

    Attributes:
        seconds: for the recorded work. tokens: that work, as recorded.
        gammas: steps at each gamma. switches: changes between off and on.
    """

    policy: str
    seconds: float
    tokens: float
    gammas: list[int]
    switches: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Recording:
    """A journal, and what it says about the server it comes from."""

    def __init__(self, path: Path) -> None:
        """Raises `UserError` where the file is no journal or too short."""
        self.states: list[State] = []
        self.steps: list[Observation] = []
        pending: State | None = None
        seen_by: dict[int, State] = {}  # what the decision of each directive was made on
        for record in records_of(path, "--replay"):
            if record.get("record") == "state":
                pending = build(State, record)
            elif record.get("record") == "directive" and pending is not None:
                seen_by[record["step"]] = pending
            elif record.get("record") == "step" and record.get("batch_size", 0) > 0:
                # With overlap scheduling the next decision comes before this outcome.
                state = seen_by.get(record.get("directive", 0), pending)
                if state is not None:
                    self.states.append(state)
                    self.steps.append(build(Observation, record))
        if len(self.steps) < _LEAST_STEPS:
            raise UserError(f"--replay {path} has {len(self.steps)} decode steps; at least {_LEAST_STEPS} are needed")
        self.max_gamma = max(max(step.gamma for step in self.steps), 1)
        self.model = CostModel(self.max_gamma)
        for _ in range(_CHECKED):
            for step in self.steps:
                self.model.learn(step)

    def recorded(self) -> Replayed:
        """What really happened."""
        gammas = [step.gamma for step in self.steps]
        seconds = sum(step.seconds for step in self.steps)
        tokens = float(sum(step.tokens for step in self.steps))
        return Replayed("(recorded)", seconds, tokens, _histogram(gammas, self.max_gamma), _switches(gammas))

    def replay(self, name: str, seed: int = 0) -> Replayed:
        """`name` in the recorded states."""
        policy = make_policy(parse_policy(name, max_gamma=self.max_gamma), PolicyOptions(self.max_gamma, seed))
        rng = random.Random(seed)
        chances = self.model.acceptance.by_position
        now_s = total_s = total_tokens = 0.0
        lag, gammas = 0, []
        for recorded, step in zip(self.states, self.steps, strict=True):
            batch = step.batch_size
            state = State(
                now_s, batch, step.kv_tokens, step.free_slots, step.total_slots, recorded.queue_length,
                recorded.queue_blocked, lag, Residency.RESIDENT,
            )  # fmt: skip
            gamma = policy.decide(state)
            catchup_s = self.model.switch_cost(lag, batch) if gamma and lag else 0.0
            seconds = self.model.step_time.predict(gamma, batch, step.kv_tokens) + catchup_s
            committed = [0] * (gamma + 1)
            for _ in range(batch):
                accepted = 0
                while accepted < gamma and rng.random() < chances[accepted]:
                    accepted += 1
                committed[accepted] += 1
            seen = Observation(
                StepKind.DECODE, batch, gamma, tuple(committed), seconds, kv_tokens=step.kv_tokens,
                free_slots=step.free_slots, total_slots=step.total_slots, queue_length=step.queue_length,
                catchup_tokens=lag * batch if gamma else 0, catchup_seconds=catchup_s,
            )  # fmt: skip
            policy.observe(seen)
            lag = 0 if gamma else lag + 1
            now_s += seconds
            total_s += seconds * step.tokens / (batch * self.model.acceptance.expected_tokens(gamma))
            total_tokens += step.tokens
            gammas.append(gamma)
        return Replayed(name, total_s, total_tokens, _histogram(gammas, self.max_gamma), _switches(gammas))


def replay(path: Path, policies: Sequence[str], seed: int = 0) -> list[Replayed]:
    """What was recorded, then each policy in its place."""
    recording = Recording(path)
    return [recording.recorded(), *(recording.replay(name, seed) for name in policies)]


def records_of(path: Path, option: str) -> list[dict[str, Any]]:
    """The journal's records; `UserError` names the `option` it was given with."""
    try:
        return read_journal(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path}: {error}; give a file written by --nightjar-journal") from None


def build(kind: Any, record: dict[str, Any]) -> Any:
    """A `State` or an `Observation` of its record."""
    fields = {name: value for name, value in record.items() if name in kind.__slots__}
    if "committed" in fields:
        fields["committed"] = tuple(fields["committed"])
    try:
        return kind(**fields)
    except TypeError as error:
        raise UserError(f"the journal is of another version: {error}") from None


def _histogram(gammas: Sequence[int], most: int) -> list[int]:
    return [gammas.count(gamma) for gamma in range(most + 1)]


def _switches(gammas: Sequence[int]) -> int:
    return sum((a > 0) != (b > 0) for a, b in zip(gammas, gammas[1:], strict=False))
