"""The speculative worker SGLang's scheduler drives; on a GPU, `cuda_worker.py`'s subclass of it.

One call is one scheduler step: a prefill (target, then draft over the same tokens), or a
decode round (draft a chain, verify it in one target forward, commit what agrees). The gamma of
a step is that of the directive in force (`controller.py`). At gamma 0 a step is a server's
without speculation: a plain decode forward, and no draft forward of any kind.
Upstream seam: `SRTPlatform.get_speculative_worker_cls("STANDALONE")`.

What a step computes stays on the device of its batch. The host reads how far the draft lags before it drafts, and
what was committed after the verification; at gamma 0 it reads nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from sglang_nightjar.config import inherited_config
from sglang_nightjar.controller_start import start_controller
from sglang_nightjar.observe.counters import StepFacts
from sglang_nightjar.patches import elastic, verify_installed
from sglang_nightjar.speculation.chain_draft import ChainDraftWorker
from sglang_nightjar.speculation.inputs import ChainDraftInput, chain_verify_input, plain_decode
from sglang_nightjar.speculation.lags import KnownLags
from sglang_nightjar.speculation.late_tokens import NONE_LATE, LateTokens
from sglang_nightjar.speculation.penalties import asks_for_penalties
from sglang_nightjar.speculation.request_options import speculates
from sglang_nightjar.speculation.same_batch import SameBatch
from sglang_nightjar.speculation.sampling import accepted_drafts, most_likely, sample_chain
from sglang_nightjar.speculation.transfer import host_lengths, to_device, to_host


class NightjarStandaloneWorker(StandaloneWorkerV2):
    """Chain speculation with a separate draft model, lossless under every sampling setting."""

    _draft_worker: ChainDraftWorker
    draft_worker_cls: type[ChainDraftWorker] = ChainDraftWorker
    _ones = torch.ones(0, dtype=torch.int32)  # as many as the last plain step had requests

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
        self._draft_worker = self.draft_worker_cls(server_args, gpu_id, nccl_port, target_worker)
        self.adaptive_controller = None
        config = inherited_config()
        assert config is not None, "the worker runs in a process of a Nightjar server only"
        self._controller = start_controller(
            config,
            rank=get_parallel().tp_rank,
            ranks=get_parallel().tp_size,
            max_gamma=self.speculative_num_steps,
        )
        self._controller.worker = self
        self._late = LateTokens()
        self._same_requests = SameBatch()
        self._penalized = False  # whether any of those requests is
        self._store = None
        if config.wants_elastic():
            self._controller.elastic = True
            self._store = elastic.make_store(target_worker.model_runner, self._draft_worker.draft_runner)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        self._lags = KnownLags(self._draft_worker.state, self._draft_worker.lags)
        self._pools_made()

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
        """Runs one step of `batch`; the scheduler restores the batch's fields afterwards.

        `on_publish` and `grammar_barrier` are given with overlap scheduling: the first takes the new lengths, the
        second brings grammars up to the step before.
        """
        facts = None
        if batch.forward_mode.is_extend():
            result = self._prefill(batch)
        else:
            result, facts = self._decode(batch, grammar_barrier)
        if facts is None or facts.gamma > 0:
            self._lags.forget()
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        if batch.enable_overlap:
            self._late.remember(batch.reqs, _runs(result))
        began_s = batch.launch_ts * self._controller.speed
        self._controller.launched(batch.forward_iter, facts, began_s=began_s, after_idle=batch.after_idle_gap)
        return result

    @property
    def draft_forwards(self) -> int:
        """Forwards of the draft so far."""
        return self._draft_worker.forwards

    def look(self, batch: Any) -> tuple[int, int]:
        """The largest number of tokens the draft has not seen of any request in `batch`, and the tokens of all."""
        return self._lags.look(batch)

    def _prefill(self, batch: Any) -> Any:
        self._controller.begin_stories(batch.reqs)
        self._before_prefill()
        result = self.target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.NULL)
        result.new_seq_lens = batch.seq_lens
        if self._controller.reads_prompts:
            with self._draft_worker.context():
                self._draft_worker.prefill(batch, self._controller.directive.catchup_tokens)
        else:
            self._draft_worker.skip(batch)
        result.next_draft_input = ChainDraftInput(bonus_tokens=result.next_token_ids)
        return result

    def _decode(self, batch: Any, grammar_barrier: Callable[[], None] | None) -> tuple[Any, StepFacts]:
        directive = self._controller.directive
        late = self._late.of(batch.reqs, (batch.seq_lens + 1).tolist()) if batch.enable_overlap else NONE_LATE
        wanted = [speculates(req) for req in batch.reqs] if directive.gamma > 0 else []
        if not any(wanted):
            return self._decode_plainly(batch, grammar_barrier, late)
        kv_tokens = int(host_lengths(batch).sum())
        with self._draft_worker.context():
            chain = self._draft_worker.draft_chain(
                batch,
                directive.gamma,
                wanted=torch.tensor(wanted),
                catchup_tokens=directive.catchup_tokens,
                with_probabilities=directive.verify_budget is not None,
                late=late,
            )
        device = chain.candidates.device
        most = torch.where(to_device(chain.drafted, device), directive.gamma, 0)
        if chain.probabilities is not None and directive.verify_budget is not None:
            most = most_likely(chain.probabilities, directive.verify_budget).minimum(most)
        result = self._verify(batch, chain.candidates, grammar_barrier, most, late)
        self._draft_worker.settle(batch, result.accept_lens, directive.gamma, chain.drafted)
        accept_lens, allowed = to_host(torch.stack((result.accept_lens.to(most.dtype), most)))
        drafted, tokens = int(chain.drafted.sum()), int(accept_lens[chain.drafted].sum())
        return result, StepFacts(
            directive.gamma,
            drafted,
            tokens,
            int(allowed.sum()) - (tokens - drafted),
            chain.catchup_tokens,
            chain.catchup_seconds() * self._controller.speed,
            chain.draft_seconds() * self._controller.speed,
            tuple(chain.drafted.tolist()),
            kv_tokens,
        )

    # -- what differs between devices --

    def _pools_made(self) -> None:
        """The KV pools of both models are there."""
        self._make_elastic()

    def _make_elastic(self, workspace_bytes: int = 0) -> None:
        """From now on memory may move between draft and KV cache. `workspace_bytes`: of the device, held for good."""
        if self._store is not None:
            target = self._target_worker.model_runner
            elastic.attach(self._controller, target, self._draft_worker, self._store, workspace_bytes)

    def _before_prefill(self) -> None:
        """Just before the target prefills."""

    def _before_verification(self, gamma: int) -> None:
        """Just before the target verifies `gamma` drafts; 0: before it decodes plainly."""

    def _verify_input(self, batch: Any, candidates: torch.Tensor) -> Any:
        """What the target's attention is told of a chain (`candidates`: int64 [B, n], n > 1)."""
        return chain_verify_input(candidates, batch.seq_lens)

    def _verify(
        self,
        batch: Any,
        candidates: torch.Tensor,
        grammar_barrier: Callable[[], None] | None,
        most: torch.Tensor,
        late: Mapping[str, Sequence[int]],
    ) -> Any:
        """Runs the target over `candidates` (int64 [B, n], n > 1) and samples after each.

        `most`: int64 [B], drafts of each request that may be accepted. `late`: output tokens the scheduler has not
        appended yet.
        """
        batch_size, width = candidates.shape
        seq_lens, device = batch.seq_lens, candidates.device
        self._before_verification(width - 1)
        batch.spec_info = self._verify_input(batch, candidates)
        forward_batch, _ = eagle_prepare_for_verify(batch.spec_info, self.req_to_token_pool, batch, self.target_worker)
        forward = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        tokens = self._sample(batch, forward.logits_output, candidates, grammar_barrier, late)
        accepted = accepted_drafts(tokens, candidates).minimum(most)
        predict = tokens.to(torch.int32).flatten()
        if batch.return_logprob:
            index = torch.arange(batch_size * width, dtype=torch.int32, device=device).view(batch_size, width)
            accept_index = torch.where(torch.arange(width, device=device) <= accepted.unsqueeze(1), index, -1)
            compute_spec_logprobs(batch, forward.logits_output, predict, accept_index=accept_index)
        accept_lens = (accepted + 1).to(torch.int32)
        return GenerationBatchResult(
            logits_output=forward.logits_output,
            next_token_ids=predict,
            can_run_cuda_graph=forward.can_run_cuda_graph,
            speculative_num_draft_tokens=width,
            next_draft_input=ChainDraftInput(bonus_tokens=tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)),
            accept_lens=accept_lens,
            new_seq_lens=seq_lens + accept_lens,
        )

    def _decode_plainly(
        self, batch: Any, grammar_barrier: Callable[[], None] | None, late: Mapping[str, Sequence[int]]
    ) -> tuple[Any, StepFacts]:
        """A step of a server without speculation: one token per request, at its next position.

        What a verification computes of every chain is known here, and each tensor operation costs the host as much as
        a scheduler's hook does.
        """
        self._before_verification(0)
        decode = plain_decode(batch, self.req_to_token_pool.req_to_token)
        self._draft_worker.skip(decode)
        forward_batch = ForwardBatch.init_new(
            decode,
            self.target_worker.model_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        forward = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
        candidates = decode.input_ids.unsqueeze(1)
        tokens = self._sample(batch, forward.logits_output, candidates, grammar_barrier, late).flatten()
        if batch.return_logprob:
            compute_spec_logprobs(batch, forward.logits_output, tokens, chain_stride=1)
        result = GenerationBatchResult(
            logits_output=forward.logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=forward.can_run_cuda_graph,
            speculative_num_draft_tokens=1,
            next_draft_input=ChainDraftInput(bonus_tokens=tokens),
            accept_lens=self._one_each(len(tokens)),
            new_seq_lens=decode.seq_lens,
        )
        return result, StepFacts(0, kv_tokens=decode.seq_lens_sum - len(tokens))

    def _one_each(self, requests: int) -> torch.Tensor:
        """int32 [requests], all 1; not to be written to."""
        if len(self._ones) != requests:
            self._ones = torch.ones(requests, dtype=torch.int32, device=self.device)
        return self._ones

    def _sample(
        self,
        batch: Any,
        logits_output: Any,
        candidates: torch.Tensor,
        grammar_barrier: Callable[[], None] | None,
        late: Mapping[str, Sequence[int]],
    ) -> torch.Tensor:
        """The target's own token after each of `candidates`, int64 [B, n]."""
        if not self._same_requests(batch):
            self._penalized = any(asks_for_penalties(req) for req in batch.reqs)
        grammar_mask = None
        if batch.has_grammar:
            chain = chain_verify_input(candidates, batch.seq_lens)
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=GrammarTree.from_device(chain.retrieve_next_token, chain.retrieve_next_sibling, candidates),
                sampling_info=batch.sampling_info,
                device=candidates.device,
                barrier=grammar_barrier,
            )
        return sample_chain(
            sampler=self.target_worker.model_runner.sampler,
            logits=logits_output.next_token_logits,
            candidates=candidates,
            seq_lens=batch.seq_lens,
            reqs=batch.reqs,
            sampling_info=batch.sampling_info,
            grammar_mask=grammar_mask,
            penalized=self._penalized,
            keep_logits=batch.return_logprob,
            late=late,
        )


def _runs(result: Any) -> list[list[int]]:
    """Tokens the step of `result` committed, of each request in order."""
    if result.accept_lens is None:
        return [[token] for token in result.next_token_ids.tolist()]
    rows = result.next_token_ids.view(len(result.accept_lens), -1).tolist()
    return [row[:count] for row, count in zip(rows, result.accept_lens.tolist(), strict=True)]
