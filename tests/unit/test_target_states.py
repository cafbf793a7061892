"""Which way of running a target is in force, over stand-ins for SGLang's backends and runners."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from sglang_nightjar.speculation.target_states import TargetState, TargetStates


@dataclass
class Runner:
    """A graph runner as SGLang's: asked about a batch, it compares widths only where the batch tells its own."""

    width: int

    def replays(self, width: int, *, tells: bool) -> bool:
        return not tells or width == self.width


@dataclass
class Target:
    """A model runner. A verification tells its width; a plain decode, of width 1, does not."""

    attn_backend: str
    decode_cuda_graph_runner: Any
    applied: int = 0

    def forward(self, gamma: int) -> None:
        runner, width = self.decode_cuda_graph_runner, gamma + 1
        if runner is None:
            assert self.attn_backend == f"backend of width {width}", "the backend takes another width"
        elif runner.replays(width, tells=gamma > 0):
            assert runner.width == width, f"{width} rows per request replayed as {runner.width}"
        else:
            assert self.attn_backend == f"backend of width {width}", "the backend takes another width"


def state(gamma: int, *, graphs: bool = True) -> TargetState:
    sizes, nbytes = ((1, 2, 4), 100) if graphs else ((), 10)
    return TargetState(gamma, f"backend of width {gamma + 1}", Runner(gamma + 1) if graphs else None, sizes, nbytes)


def make(most: int = 3, *, without_graphs: tuple[int, ...] = ()) -> tuple[Target, TargetStates]:
    home, *others = [state(gamma, graphs=gamma not in without_graphs) for gamma in range(most, -1, -1)]
    target = Target(home.attn_backend, home.graph_runner)

    def apply(chosen: TargetState) -> None:
        target.attn_backend, target.decode_cuda_graph_runner = chosen.attn_backend, chosen.graph_runner
        target.applied += 1

    return target, TargetStates(home, others, apply)


def test_a_plain_decode_under_a_verification_is_the_trap() -> None:
    """What the states are for: this stand-in falls into it, as SGLang's runner does."""
    target, _ = make()
    with pytest.raises(AssertionError, match="1 rows per request replayed as 4"):
        target.forward(0)
    target.decode_cuda_graph_runner = None
    with pytest.raises(AssertionError, match="the backend takes another width"):
        target.forward(1)


@pytest.mark.parametrize("without_graphs", [(), (2,), (0,), (0, 1, 2, 3)])
def test_any_sequence_of_gammas(without_graphs: tuple[int, ...]) -> None:
    rng = random.Random(1)
    target, states = make(without_graphs=without_graphs)
    for _ in range(500):
        if rng.random() < 0.2:
            states.before_prefill()
            assert states.in_force.gamma == 3 and target.attn_backend == "backend of width 4"
        else:
            gamma = rng.randrange(4)
            states.before_verification(gamma)
            target.forward(gamma)
    assert target.applied == states.switches > 200


def test_nothing_is_done_where_the_state_stays() -> None:
    target, states = make()
    for _ in range(5):
        states.before_verification(2)
        target.forward(2)
    assert states.switches == target.applied == 1 and states.in_force.width == 3


def test_a_gamma_without_a_state_is_a_mistake() -> None:
    home, plain = state(3), state(0)
    states = TargetStates(home, [plain], lambda chosen: None)
    with pytest.raises(AssertionError, match=r"gamma 2 is to run, and there are states for \(0, 3\) only"):
        states.before_verification(2)
    with pytest.raises(AssertionError, match="none for a plain decode"):
        TargetStates(home, [state(1)], lambda chosen: None)


def test_their_memory_is_what_making_them_took() -> None:
    home = TargetState(3, "backend", None, nbytes=0)
    assert TargetStates(home, [state(0), state(1)], lambda chosen: None).nbytes == 200
