"""What happened: in one decode step, and since the start."""

from dataclasses import dataclass

_REMEMBER = 0.98  # weight of a prompt after the next one


@dataclass(slots=True)
class Counters:
    """What has happened since the start, as `/server_info` shows it.

    Attributes:
        steps_by_gamma: decode steps at each gamma.
        switches: changes between gamma 0 and above.
        committed, drafted: tokens committed by drafting requests and how often they drafted.
        rejected: drafts that were verified and not accepted.
        catchup_tokens, catchup_seconds: lagging tokens the draft has read, and the time it took.
        refused_steps: outcomes the policy would not learn from.
        arrived: requests, on rank 0. retracted: how often one lost its KV slots and had to be prefilled again.
    """

    steps_by_gamma: list[int]
    switches: int = 0
    committed: int = 0
    drafted: int = 0
    rejected: int = 0
    catchup_tokens: int = 0
    catchup_seconds: float = 0.0
    refused_steps: int = 0
    arrived: int = 0
    retracted: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the worker did in one decode step. `drafted`: requests that drafted; `tokens`: what those committed;
    `rejected`: their drafts that were verified and not accepted. `drafting`: whether each request of the batch drafted,
    in order; empty where none did. `draft_seconds`: of the draft's forwards, catching up left out. `kv_tokens`: of all
    requests, before the step."""

    gamma: int
    drafted: int = 0
    tokens: int = 0
    rejected: int = 0
    catchup_tokens: int = 0
    catchup_seconds: float = 0.0
    draft_seconds: float = 0.0
    drafting: tuple[bool, ...] = ()
    kv_tokens: int = 0


@dataclass(slots=True)
class HitRate:
    """The share of prompt tokens that the radix cache has served lately; older prompts count less."""

    tokens: float = 0.0
    cached: float = 0.0

    def add(self, tokens: int, cached: int) -> None:
        """A prompt whose prefill is over, and how many of its tokens the cache had."""
        self.tokens = _REMEMBER * self.tokens + tokens
        self.cached = _REMEMBER * self.cached + cached

    @property
    def value(self) -> float:
        return self.cached / self.tokens if self.tokens else 0.0
