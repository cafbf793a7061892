"""What the server is given: a planner, the cost of its work, and how it is run."""

from typing import Protocol

import msgspec

from sglang_nightjar.policy.base import Decision, Observation, State
from sglang_nightjar.simulate.elastic import PoolCosts
from sglang_nightjar.simulate.fields import Count, CountOrNone, NotNegative


class Planner(Protocol):
    """Decides gamma and residency; the controller's object in the real server."""

    def decide(self, state: State) -> Decision: ...

    def observe(self, seen: Observation) -> None: ...

    def reads_prompts(self, state: State) -> bool: ...


class Cost(PoolCosts, Protocol):
    """Seconds of a server's work; `roofline.StepCost` documents each method."""

    @property
    def max_gamma(self) -> int: ...

    def step_s(
        self,
        batch: int,
        gamma: int,
        kv_tokens: float,
        *,
        drafters: int | None = None,
        verify_tokens: int | None = None,
        prefill_tokens: int = 0,
    ) -> float: ...

    def prefill_s(self, tokens: int, kv_tokens: float, draft: bool) -> float: ...

    def catchup_s(self, tokens: int, kv_tokens: float) -> float: ...


class ServerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the server is run.

    Attributes:
        max_running: most requests decoded together.
        chunk: prompt tokens of one prefill step.
        mixed: prefill chunks ride along decode steps, instead of steps of their own that come first.
        decode_reserve: output tokens kept free per request when another one is admitted; with `reserve_output` all that
            it will write, as SGLang does for requests that ignore their end, such as a benchmark's.
        catchup_budget: lagging tokens the draft reads in one step at most.
        evict_s: from the eviction until the pool has grown.
        move_s: how long decoding stops for an eviction, or for a contraction besides its relocation.
        margin: slots that must stay free after a contraction.
        time_noise: standard deviation of the logarithm of a step's time.
        start_evicted: the draft begins in host memory.
    """

    max_running: Count = 256
    chunk: Count = 8192
    mixed: bool = False
    decode_reserve: CountOrNone = 128
    reserve_output: bool = False
    catchup_budget: Count = 16384
    evict_s: NotNegative = 0.02
    move_s: NotNegative = 0.005
    margin: CountOrNone = 2048
    time_noise: NotNegative = 0.03
    start_evicted: bool = False
