"""The speculative worker SGLang's scheduler drives on the CPU platform.

One call is one scheduler step: a prefill (target, then draft over the same tokens), or a
decode round (draft a chain, verify it in one target forward, commit what agrees). The gamma of
a step is that of the directive in force (`controller.py`). At gamma 0 a step is a server's
without speculation: a plain decode forward, and no draft forward of any kind.
Upstream seam: `SRTPlatform.get_speculative_worker_cls("STANDALONE")`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask, draft_tp_context
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from sglang_nightjar import controller
from sglang_nightjar.config import inherited_config
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.patches import elastic, verify_installed
from sglang_nightjar.speculation.chain_draft import ChainDraftWorker
from sglang_nightjar.speculation.inputs import ChainDraftInput, chain_verify_input
from sglang_nightjar.speculation.request_options import speculates
from sglang_nightjar.speculation.sampling import accepted_drafts, most_likely, sample_chain


class NightjarStandaloneWorker(StandaloneWorkerV2):
    """Chain speculation with a separate draft model, lossless under every sampling setting.

    Attributes:
        last_step: what the last decode step did.
    """

    _draft_worker: ChainDraftWorker
    last_step = StepFacts(0)

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        verify_installed()
        # Upstream's own __init__ would build its draft worker, and refuse vocabularies padded to two sizes.
        BaseSpecWorker.__init__(self)
        self.server_args = server_args
        self.topk = get_spec().speculative_eagle_topk
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.speculative_num_draft_tokens = get_spec().speculative_num_draft_tokens
        self.gpu_id = gpu_id
        self.device = get_device().device
        self._target_worker = target_worker
        self.page_size = get_schedule().page_size
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
        self._draft_worker = ChainDraftWorker(server_args, gpu_id, nccl_port, target_worker)
        self.adaptive_controller = None
        config = inherited_config()
        assert config is not None, "the worker runs in a process of a Nightjar server only"
        self._controller = controller.start(
            config,
            rank=get_parallel().tp_rank,
            ranks=get_parallel().tp_size,
            max_gamma=self.speculative_num_steps,
        )
        self._controller.worker = self
        self._store = None
        if config.wants_elastic():
            self._controller.elastic = True
            self._store = elastic.make_store(target_worker.model_runner, self._draft_worker.draft_runner)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        if self._store is not None:
            elastic.attach(self._controller, self._target_worker.model_runner, self._draft_worker, self._store)

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self._target_worker.model_runner.attn_backend, self._draft_worker.draft_runner.attn_backend)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any | None = None,
    ) -> Any:
        """Runs one step of `batch`; the scheduler restores the batch's fields afterwards."""
        result = self._prefill(batch) if batch.forward_mode.is_extend() else self._decode(batch, grammar_barrier)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    @property
    def draft_forwards(self) -> int:
        """Forwards of the draft so far."""
        return self._draft_worker.forwards

    def max_lag(self, batch: Any) -> int:
        """The largest number of tokens the draft has not seen of any request in `batch`."""
        return int(self._draft_worker.lags(batch).max())

    def _prefill(self, batch: Any) -> Any:
        result = self.target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.NULL)
        result.new_seq_lens = batch.seq_lens
        if self._controller.gamma == 0:
            self._draft_worker.skip_prefill(batch)
        else:
            with draft_tp_context(self._draft_worker.parallel_layout):
                self._draft_worker.prefill(batch, self._controller.directive.catchup_tokens)
        result.next_draft_input = ChainDraftInput(bonus_tokens=result.next_token_ids)
        return result

    def _decode(self, batch: Any, grammar_barrier: Callable[[], None] | None) -> Any:
        directive = self._controller.directive
        wanted = torch.tensor([speculates(req) for req in batch.reqs])
        if directive.gamma == 0 or not wanted.any():
            candidates = batch.spec_info.bonus_tokens.to(torch.int64).unsqueeze(1)
            result = self._verify(batch, candidates, grammar_barrier, None)
            self._draft_worker.settle(batch, result.accept_lens, 0)
            self.last_step = StepFacts(0)
            return result
        with draft_tp_context(self._draft_worker.parallel_layout):
            chain = self._draft_worker.draft_chain(
                batch,
                directive.gamma,
                wanted=wanted,
                catchup_tokens=directive.catchup_tokens,
                with_probabilities=directive.verify_budget is not None,
            )
        most = torch.where(chain.drafted, directive.gamma, 0)
        if chain.probabilities is not None and directive.verify_budget is not None:
            most = most_likely(chain.probabilities, directive.verify_budget).minimum(most)
        result = self._verify(batch, chain.candidates, grammar_barrier, most)
        self._draft_worker.settle(batch, result.accept_lens, directive.gamma, chain.drafted)
        drafted, tokens = int(chain.drafted.sum()), int(result.accept_lens[chain.drafted].sum())
        self.last_step = StepFacts(
            directive.gamma,
            drafted,
            tokens,
            int(most.sum()) - (tokens - drafted),
            chain.catchup_tokens,
            chain.catchup_seconds,
        )
        return result

    def _verify(
        self,
        batch: Any,
        candidates: torch.Tensor,
        grammar_barrier: Callable[[], None] | None,
        most: torch.Tensor | None,
    ) -> Any:
        """Runs the target over `candidates` (int64 [B, n]) and samples after each; n = 1 is a plain decode.

        `most`: int64 [B], drafts of each request that may be accepted; None for no limit.
        """
        batch_size, width = candidates.shape
        seq_lens = batch.seq_lens
        verify_input = chain_verify_input(candidates, seq_lens)
        if width == 1:
            forward_batch, can_run_cuda_graph = self._plain_decode_batch(batch, candidates), False
        else:
            batch.spec_info = verify_input
            forward_batch, can_run_cuda_graph = eagle_prepare_for_verify(
                verify_input, self.req_to_token_pool, batch, self.target_worker
            )
        logits_output = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        ).logits_output

        grammar_mask = None
        if batch.has_grammar:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=GrammarTree.from_device(
                    verify_input.retrieve_next_token, verify_input.retrieve_next_sibling, candidates
                ),
                sampling_info=batch.sampling_info,
                device=candidates.device,
                barrier=grammar_barrier,
            )
        tokens = sample_chain(
            sampler=self.target_worker.model_runner.sampler,
            logits=logits_output.next_token_logits,
            candidates=candidates,
            seq_lens=seq_lens,
            reqs=batch.reqs,
            sampling_info=batch.sampling_info,
            grammar_mask=grammar_mask,
        )
        accepted = accepted_drafts(tokens, candidates)
        if most is not None:
            accepted = accepted.minimum(most)
        index = torch.arange(batch_size * width, dtype=torch.int32).view(batch_size, width)
        accept_index = torch.where(torch.arange(width) <= accepted.unsqueeze(1), index, -1)
        predict = tokens.to(torch.int32).flatten()
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, predict, accept_index=accept_index)
        accept_lens = (accepted + 1).to(torch.int32)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=predict,
            can_run_cuda_graph=can_run_cuda_graph,
            speculative_num_draft_tokens=width,
            next_draft_input=ChainDraftInput(bonus_tokens=tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)),
            accept_lens=accept_lens,
            accept_index=accept_index,
            new_seq_lens=seq_lens + accept_lens,
        )

    def _plain_decode_batch(self, batch: Any, candidates: torch.Tensor) -> Any:
        """The forward of a server without speculation: one token per request, at its next position."""
        seq_lens = batch.seq_lens.to(torch.int64)
        rows = batch.req_pool_indices.to(torch.int64)
        decode = copy.copy(batch)
        decode.forward_mode = ForwardMode.DECODE
        decode.input_ids = candidates.flatten()
        decode.out_cache_loc = self.req_to_token_pool.req_to_token[rows, seq_lens].to(torch.int64)
        decode.seq_lens = seq_lens + 1
        decode.seq_lens_cpu = decode.seq_lens
        decode.seq_lens_sum = int(decode.seq_lens.sum())
        decode.spec_info = None
        return ForwardBatch.init_new(
            decode,
            self.target_worker.model_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
