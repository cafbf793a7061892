"""Makes the states of `target_states.py` out of SGLang's attention backends and CUDA graph runners.

Untested on a GPU: the order of calls is tested over stand-ins, what they do is read from SGLang's source.
Sources, in `sglang.srt`: `speculative.eagle_worker_v2.EAGLEWorkerV2.build_adaptive_runtime_state` and
`apply_runtime_state`, `model_executor.runner.DecodeCudaGraphRunner.__init__`,
`model_executor.model_runner.ModelRunner._get_attention_backend`. Upstream's own states cannot be used: they come with
graphs of a whole draft, and gamma 0 is a verification of width 1 there.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner, get_batch_sizes_to_capture
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_nightjar.speculation.target_states import TargetState, TargetStates

logger = logging.getLogger(__name__)


def graphs_wanted() -> bool:
    """Whether decodes are captured in this server at all (`--cuda-graph-backend-decode`)."""
    return not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def sizes_to_capture(runner: Any, width: int = 1) -> tuple[int, ...]:
    """Batch sizes SGLang captures for `runner` at `width` rows per request; none where it captures nothing."""
    return tuple(get_batch_sizes_to_capture(runner, width)[0]) if graphs_wanted() else ()


def build_states(
    target: Any, home_gamma: int, reach: Mapping[int, Sequence[int]], free_bytes: Callable[[], int]
) -> TargetStates:
    """Makes a state for each gamma of `reach`, the largest batches first, and captures its graphs.

    Args:
        target: SGLang's model runner of the target, its own graphs captured: those of a verification of
            `home_gamma` drafts.
        reach: batch sizes to capture, by gamma (`policy/reach.py`); others run without a graph.
        free_bytes: of the device; asked before and after each.
    """
    runner = target.decode_cuda_graph_runner
    home_sizes = tuple(runner.capture_bs) if isinstance(runner, DecodeCudaGraphRunner) else ()
    home = TargetState(home_gamma, target.attn_backend, runner, home_sizes)
    others = [
        _build(target, gamma, tuple(reach[gamma]), free_bytes)
        for gamma in sorted(reach, reverse=True)
        if gamma != home_gamma
    ]

    def apply(state: TargetState) -> None:
        target.attn_backend = state.attn_backend
        target.decode_cuda_graph_runner = state.graph_runner

    return TargetStates(home, others, apply)


def _build(target: Any, gamma: int, sizes: tuple[int, ...], free_bytes: Callable[[], int]) -> TargetState:
    before = free_bytes()
    workspace = target.init_new_workspace
    with ExitStack() as stack:
        stack.enter_context(get_spec().override(speculative_num_steps=gamma, speculative_num_draft_tokens=gamma + 1))
        if gamma == 0:
            stack.enter_context(without_speculation(target))
        try:
            backend = target._get_attention_backend(init_new_workspace=True)
        finally:
            target.init_new_workspace = workspace
        runner = capture(target, backend, gamma, sizes) if sizes else None
    nbytes = max(before - free_bytes(), 0)
    logger.info("gamma %d: %d graphs of batches up to %d, %d bytes", gamma, len(sizes), max(sizes, default=0), nbytes)
    return TargetState(gamma, backend, runner, sizes, nbytes)


def capture(runner: Any, backend: Any, gamma: int, sizes: Sequence[int]) -> Any:
    """A graph runner for batches of `sizes`; the runner's mode and widths must be in force (`_build`)."""
    with only_sizes(sizes):
        made = DecodeCudaGraphRunner(
            runner, attn_backend=backend, speculative_num_steps=gamma, speculative_num_draft_tokens=gamma + 1
        )
    assert made.captured_req_width == gamma + 1, (
        f"graphs for gamma {gamma} were captured with {made.captured_req_width} rows per request"
    )
    verifies = made.capture_forward_mode.is_target_verify()
    assert verifies == (gamma > 0), f"graphs for gamma {gamma} were captured in {made.capture_forward_mode.name} mode"
    return made


@contextmanager
def without_speculation(runner: Any) -> Iterator[None]:
    """`runner` takes itself for a server's that does not speculate: what is captured then are plain decodes.

    `DecodeCudaGraphRunner.__init__` chooses its mode, its width and its batch's `spec_info` by this one attribute; when
    it replays, it asks it only for algorithms that are not ours (`is_ngram`, `is_dspark`, `is_dflash_family`).
    """
    algorithm = runner.spec_algorithm
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        yield
    finally:
        runner.spec_algorithm = algorithm


@contextmanager
def only_sizes(sizes: Sequence[int]) -> Iterator[None]:
    """Graph runners made meanwhile capture these batch sizes (`get_batch_sizes_to_capture`)."""
    decode = get_exec().graph.cuda_graph_config.decode
    configured = decode.bs
    decode.bs = list(sizes)
    try:
        yield
    finally:
        decode.bs = configured
