"""The ways a GPU's target can run, one per gamma, and which of them is in force.

On a CUDA device SGLang's attention backends learn the width of a verification when they are made (FlashAttention's
`speculative_num_draft_tokens`, Triton's mask), and its graph runners when they capture. So a target has one
backend, and one set of captured graphs, for each width; a state is such a pair. State 0 decodes plainly.
It must be in force before any plain decode, whatever the policy asked for: a decode carries nothing by which a
verification's runner could refuse it (`DecodeCudaGraphRunner.can_run_graph`), and would be replayed as one.

This module knows no SGLang: it says which states there are to be and switches between them. `cuda_states.py`
makes them. Source: docs/gpu-graphs.md.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TargetState:
    """What the target's model runner is given to run at one gamma.

    Attributes:
        gamma: drafts verified per request; 0: none, a plain decode.
        attn_backend: SGLang's.
        graph_runner: with graphs captured for this gamma; None: it runs without.
        graph_sizes: batch sizes captured. Larger batches, and all where there are none, run eagerly on `attn_backend`.
        nbytes: of device memory that making this state took; 0 for the one the server's start made.
    """

    gamma: int
    attn_backend: Any
    graph_runner: Any | None
    graph_sizes: tuple[int, ...] = ()
    nbytes: int = 0

    @property
    def width(self) -> int:
        """Rows per request."""
        return self.gamma + 1


class TargetStates:
    """All of one target, one of them in force.

    Attributes:
        switches: how often another was put in force.
    """

    def __init__(self, home: TargetState, others: Iterable[TargetState], apply: Callable[[TargetState], None]) -> None:
        """
        Args:
            home: the one in force now, which the server's start made. Prompts are computed under it, since graphs of
                prefill forwards were captured with its backend.
            apply: puts one in force; called by the scheduler's thread, between forwards.
        """
        self._states = {state.gamma: state for state in (*others, home)}
        self._home = self._now = home
        self._apply = apply
        self.switches = 0
        assert 0 in self._states, f"states for gamma {sorted(self._states)}, and none for a plain decode"

    @property
    def in_force(self) -> TargetState:
        return self._now

    @property
    def nbytes(self) -> int:
        """Device memory that making them took, beyond what the server's start did."""
        return sum(state.nbytes for state in self._states.values())

    @property
    def gammas(self) -> tuple[int, ...]:
        return tuple(sorted(self._states))

    def before_prefill(self) -> None:
        """Prompts are about to be computed."""
        self._put(self._home)

    def before_verification(self, gamma: int) -> None:
        """`gamma` drafts per request are about to be verified; 0: a plain decode."""
        state = self._states.get(gamma)
        assert state is not None, f"gamma {gamma} is to run, and there are states for {self.gammas} only"
        self._put(state)

    def _put(self, state: TargetState) -> None:
        if state is self._now:
            return
        self._apply(state)
        self._now = state
        self.switches += 1
