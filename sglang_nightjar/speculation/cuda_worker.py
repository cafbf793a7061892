"""The speculative worker on a GPU: the CPU platform's, over SGLang's CUDA attention backends and graphs.

**Untested on a GPU.** Tested over stand-ins for SGLang's runners and for device tensors. It serves only where what the
user asked for needs it (`NightjarConfig.own_worker`); else SGLang's own STANDALONE worker does.
Upstream seam: `patches/spec_worker.py`; what is used of SGLang's worker is named at each method.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import default_tree_mask_mode
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
from sglang.srt.speculative.spec_utils import draft_pp_context
from sglang.srt.utils.common import get_available_gpu_memory

from sglang_nightjar.attribution import ArrivalClock, InFlight
from sglang_nightjar.config import inherited_config
from sglang_nightjar.policy.reach import reachable
from sglang_nightjar.speculation import cuda_states
from sglang_nightjar.speculation.chain_draft import ChainDraftWorker
from sglang_nightjar.speculation.cuda_limits import check_backends, check_models
from sglang_nightjar.speculation.target_states import TargetStates
from sglang_nightjar.speculation.worker import NightjarStandaloneWorker

logger = logging.getLogger(__name__)


class CudaChainDraftWorker(ChainDraftWorker):
    """The draft: eager extends of any length, and plain decodes from one set of graphs whatever gamma is.

    Attributes:
        graph_bytes: of device memory that capturing took.
    """

    graph_bytes = 0

    @contextmanager
    def context(self) -> Iterator[None]:
        """As around a draft's forwards in `EAGLEWorkerV2.forward_batch_generation`."""
        with (
            super().context(),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    def init_cuda_graphs(self) -> None:
        """As `EagleDraftWorker.init_cuda_graphs`, without graphs of a draft's prefill: those take a fixed width."""
        with draft_pp_context(), self.context():
            self.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)
            self._capture_cuda_graphs()

    def _capture_cuda_graphs(self) -> None:
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None
        runner = self.draft_runner
        with cuda_states.without_speculation(runner):
            sizes = cuda_states.sizes_to_capture(runner)
            if not sizes or self.speculative_num_steps < 2:  # of a single draft there is nothing to decode
                return
            before = free_bytes(runner)
            with get_spec().override(speculative_num_steps=0, speculative_num_draft_tokens=1):
                runner.decode_cuda_graph_runner = cuda_states.capture(runner, runner.attn_backend, 0, sizes)
        self.graph_bytes = max(before - free_bytes(runner), 0)
        self._specialized_graph_memory_usage["draft_decode"] = self.graph_bytes / 2**30


class CudaStandaloneWorker(NightjarStandaloneWorker):
    """`NightjarStandaloneWorker` on a GPU.

    Attributes:
        states: of the target, one per gamma; made once everything else is.
    """

    _draft_worker: CudaChainDraftWorker
    draft_worker_cls = CudaChainDraftWorker
    states: TargetStates

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        logger.warning("Nightjar's own speculative worker serves on this GPU; the project has never run it on one")
        check_models(target_worker.model_runner)
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        check_models(self._draft_worker.draft_runner)
        self._controller.flight = InFlight(ArrivalClock())  # a launch returns before the device has done the step
        self._chains: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def last_shared_read_runner(self) -> Any:
        """The target's forward comes last in every step, at any gamma (docs/gpu-graphs.md)."""
        return self._target_worker.model_runner

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        check_backends(self._target_worker.model_runner)
        check_backends(self._draft_worker.draft_runner)

    def init_cuda_graphs(self) -> None:
        """Captures what is left; the target's graphs for the largest gamma are there.

        Upstream caller: `Scheduler.init_all_cuda_graphs`. Only now is it known what memory graphs take, so memory
        becomes elastic here and not with the pools.
        """
        super().init_cuda_graphs()
        config = inherited_config()
        assert config is not None, "the worker runs in a process of a Nightjar server only"
        target = self._target_worker.model_runner
        sizes = cuda_states.sizes_to_capture(target, self.speculative_num_draft_tokens)
        self.states = cuda_states.build_states(
            target,
            self.speculative_num_steps,
            reachable(config.policy_spec(), sizes, target.max_running_requests),
            lambda: free_bytes(target),
        )
        self._additional_graph_memory_usage["target_verify"] = self.states.nbytes / 2**30
        self._make_elastic(self.states.nbytes + self._draft_worker.graph_bytes)

    def _pools_made(self) -> None:
        """Not yet (`init_cuda_graphs`)."""

    def _before_prefill(self) -> None:
        self.states.before_prefill()

    def _before_verification(self, gamma: int) -> None:
        self.states.before_verification(gamma)

    def _verify_input(self, batch: Any, candidates: torch.Tensor) -> Any:
        """SGLang's own for a chain, with the mask that the backend in force reads (`EAGLEWorkerV2.draft`).

        FlashAttention reads none at top-k 1, Triton and FlashInfer do: without one, FlashInfer takes everything for
        visible, and a draft would see those after it.
        """
        size, width = candidates.shape
        gamma = width - 1
        if gamma not in self._chains:
            self._chains[gamma] = chain_tree(gamma, self._target_worker.model_runner.max_running_requests, self.device)
        parents, scores = self._chains[gamma]
        return build_eagle_verify_input(
            batch,
            batch.spec_info,
            parents[:size],
            scores[:size],
            candidates[:, 1:].contiguous(),
            None,
            target_worker=self._target_worker,
            topk=1,
            num_steps=gamma,
            num_draft_tokens=width,
            tree_mask_mode=default_tree_mask_mode(),
            device=self.device,
        )


def chain_tree(gamma: int, requests: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents and scores by which SGLang's tree builder makes a chain of `gamma` drafts, int64 [requests, ...].

    As `EagleDraftWorkerBase._rebuild_topk1_chain_buffers`: a chain of one has no parents.
    """
    parents = torch.arange(-1, gamma - 1 if gamma > 1 else -1, device=device)
    return parents.repeat(requests, 1), torch.arange(gamma, device=device).repeat(requests, 1)


def free_bytes(runner: Any) -> int:
    """Of the GPU of a model runner, what torch keeps and does not use given back first."""
    return int(get_available_gpu_memory(runner.device, runner.gpu_id) * (1 << 30))
