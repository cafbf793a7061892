"""Drafting a chain with an ordinary language model that shares the target's KV slots.

SGLang's STANDALONE worker keeps EAGLE's convention: the draft's slot i holds token i + 1.
That makes a slot's draft KV depend on what came after it, which a shared prefix cannot
promise. Here slot i holds token i, as in the target, so the validity of a slot is a
property of the slot. The draft's first forward of a step is always the same one: an extend
over committed tokens it has not seen. In a prefill that is the prompt; in a decode round it is
the bonus token, the last draft of the round before if that was accepted, and whatever the
target decoded alone meanwhile (the lag). A long lag is read in chunks within a budget per step;
a request drafts once it has been read to its end.

A step is planned on the host, from one read of the device: how far each request lags. What it computes stays on
the device of the batch (`transfer.py`).
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.spec_utils import draft_tp_context
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from sglang_nightjar.emulate.draft import EmulatedDraft, emulated_draft
from sglang_nightjar.platform.fused_llama import FusedLlama, why_not
from sglang_nightjar.speculation.draft_state import DraftState
from sglang_nightjar.speculation.late_tokens import NONE_LATE
from sglang_nightjar.speculation.reading import ORDINARY_LAG, catchup_plan, committed_tokens, rows_of
from sglang_nightjar.speculation.transfer import (
    Stopwatch,
    all_to_device,
    host_lengths,
    stopwatch,
    to_device,
    to_host,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftedChain:
    """What a round of drafting gave.

    Attributes:
        candidates: int64 [B, gamma + 1]: the bonus token, then the drafted ones; of a request that did not
            draft, its bonus token throughout.
        drafted: bool [B], on the host: which requests drafted.
        probabilities: float32 [B, gamma]: the draft's own probability of each drafted token, where asked for.
        catchup_tokens: tokens read beyond the ordinary lag; `catchup_share` of all that were read.
        reading, drafting: over the first forward, which reads what is committed, and over those after it.
    """

    candidates: torch.Tensor
    drafted: torch.Tensor
    probabilities: torch.Tensor | None
    catchup_tokens: int
    catchup_share: float
    reading: Stopwatch
    drafting: Stopwatch

    def catchup_seconds(self) -> float:
        """The time that catching up took; asked once the step's result has been read (`Stopwatch.seconds`)."""
        return self.reading.seconds() * self.catchup_share

    def draft_seconds(self) -> float:
        """The time that the rest of the draft's work took; asked as above."""
        return self.reading.seconds() * (1.0 - self.catchup_share) + self.drafting.seconds()


class ChainDraftWorker(StandaloneDraftWorker):
    """Owns the draft model and the validity of its KV; loading and pools are upstream's.

    Attributes:
        state: which slots hold draft KV.
        forwards: draft forwards run so far.
        fused: runs the draft in few calls, where its model allows it; None: SGLang's modules do.
    """

    state: DraftState
    forwards = 0
    fused: FusedLlama | EmulatedDraft | None = None

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        # As many as the target's buffers have room for: an elastic pool may grow.
        target = self.target_worker.model_runner
        self.state = DraftState(len(target.token_to_kv_pool.k_buffer[0]), self.req_to_token_pool.req_to_token.device)
        self._most_tokens = self.draft_runner.max_total_num_tokens  # `EagerRunner` makes its buffers as long
        # Padded sizes may differ although the tokenizer is one: draft no token the target
        # lacks, and read none the draft lacks.
        self._draft_vocab = self.draft_runner.model_config.vocab_size
        self._common_vocab = min(self._draft_vocab, target.model_config.vocab_size)
        self.fused = emulated_draft(self.draft_runner)
        reason = None if self.fused is not None else why_not(self.draft_runner)
        if self.fused is None and reason is None:
            self.fused = FusedLlama(self.draft_runner)
        logger.info("the draft runs %s", "fused" if reason is None else f"through SGLang's modules: {reason}")

    def init_attention_backend(self) -> None:
        """The draft runner's own backend serves every step; upstream's per-step backends are not built."""
        self.draft_attn_backend = None
        self.draft_extend_attn_backend = None

    def context(self) -> AbstractContextManager[Any]:
        """In force while the draft runs."""
        return cast(AbstractContextManager[Any], draft_tp_context(self.parallel_layout))

    def prefill(self, batch: Any, catchup_tokens: int) -> None:
        """Runs the draft over what the target has just prefilled (`batch` in EXTEND mode).

        It starts where the draft's own KV ends, which may lie inside a cached prefix: the last
        token of an earlier request is often one that only the target has seen, and a prefix may have been
        cached while the draft was away. Of such tokens at most `catchup_tokens` are read here.
        """
        self.state.clear(batch.out_cache_loc)
        ends = host_lengths(batch)
        starts = ends - self.lags(batch)
        budget = self._within_buffers(int(batch.extend_num_tokens) + catchup_tokens, len(ends))
        stops, _ = catchup_plan(starts, ends, torch.ones(len(ends), dtype=torch.bool), budget)
        reading = (stops > starts).nonzero().flatten()
        if len(reading):
            self._extend(rows_of(batch, reading), starts[reading], stops[reading])

    def skip(self, batch: Any) -> None:
        """The target alone computes `batch`: its new slots hold no draft KV."""
        self.state.clear(batch.out_cache_loc)

    def lags(self, batch: Any) -> torch.Tensor:
        """Committed tokens with target KV that the draft has not seen, int64 [B], on the host."""
        seq_lens = batch.seq_lens.to(torch.int64)
        rows = batch.req_pool_indices.to(torch.int64)
        return to_host(seq_lens - self.state.draft_lens(self.req_to_token_pool.req_to_token, rows, seq_lens))

    def draft_chain(
        self,
        batch: Any,
        gamma: int,
        *,
        wanted: torch.Tensor,
        catchup_tokens: int,
        with_probabilities: bool = False,
        late: Mapping[str, Sequence[int]] = NONE_LATE,
    ) -> DraftedChain:
        """Catches up within the budget, then drafts `gamma` tokens, greedily, for every request that has.

        Args:
            batch: a decode batch; `seq_lens` counts the tokens with target KV, `spec_info.bonus_tokens`
                the next one.
            wanted: bool [B], on the host: which requests may draft at all.
            catchup_tokens: most tokens to read beyond the ordinary lag.
            with_probabilities: also return how probable the draft found its tokens.
            late: output tokens the scheduler has not appended yet (`late_tokens.py`).
        Returns:
            The chain. The slots of its tokens hold draft KV, except the last one's; `settle` says afterwards
            which of them count.
        """
        device = batch.seq_lens.device
        ends = host_lengths(batch) + 1
        starts = ends - 1 - self.lags(batch)
        stops, extra = catchup_plan(starts, ends, wanted, self._within_buffers(catchup_tokens, len(ends)))
        drafted = wanted & (stops == ends)
        candidates = batch.spec_info.bonus_tokens.to(torch.int64).unsqueeze(1).repeat(1, gamma + 1)
        probabilities = torch.zeros((len(ends), gamma), device=device) if with_probabilities else None

        reading = (stops > starts).nonzero().flatten()
        read, drafted_in, logits = stopwatch(device), stopwatch(device), None
        if len(reading):
            read.start()
            logits = self._extend(rows_of(batch, reading), starts[reading], stops[reading], late)
            read.stop()
        total = int((stops - starts).sum())

        rows = drafted.nonzero().flatten()
        if len(rows):
            assert logits is not None
            if len(rows) < len(reading):
                logits = logits[to_device(drafted[reading].nonzero().flatten(), device)]
            drafting, index = rows_of(batch, rows), to_device(rows, device)
            drafted_in.start()
            for step in range(1, gamma + 1):
                tokens = logits.argmax(-1)
                candidates[index, step] = tokens
                if probabilities is not None:
                    probabilities[index, step - 1] = logits.softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
                if step < gamma:
                    logits = self._decode(drafting, step, tokens)
            drafted_in.stop()
        share = extra / total if total else 0.0
        return DraftedChain(candidates, drafted, probabilities, extra, share, read, drafted_in)

    def settle(self, batch: Any, accept_lens: torch.Tensor, gamma: int, drafted: torch.Tensor) -> None:
        """After verification: of the slots written this round, valid are those of accepted tokens the draft has seen.

        Args:
            batch: the batch of `draft_chain`, its `seq_lens` still those of before the round.
            accept_lens: int [B], tokens committed: accepted drafts and the new bonus token.
            gamma: tokens drafted; the bonus token and the first gamma - 1 of them went through the draft.
            drafted: bool [B], on the host, which requests drafted.
        """
        steps = torch.arange(gamma + 1, device=batch.seq_lens.device)
        slots = self._slots(batch, batch.seq_lens.to(torch.int64).unsqueeze(1) + steps)
        seen = steps < accept_lens.clamp(max=gamma).unsqueeze(1)
        self.state.set(slots, seen & to_device(drafted, seen.device).unsqueeze(1))

    def _within_buffers(self, tokens: int, requests: int) -> int:
        """As many of `tokens` beyond the ordinary lag as one forward of SGLang's runner has buffers for."""
        return max(min(tokens, self._most_tokens - ORDINARY_LAG * requests), 0)

    def _extend(
        self, batch: Any, starts: torch.Tensor, stops: torch.Tensor, late: Mapping[str, Sequence[int]] = NONE_LATE
    ) -> torch.Tensor:
        """One forward over each request's tokens from `starts` up to `stops` (exclusive).

        Args:
            starts, stops: int64 [B], on the host, at least one token each; all of them committed, their slots the
                request's own.
            late: committed tokens the scheduler has not appended yet.
        Returns:
            float32 [B, V]: the draft's logits after each request's last one.
        """
        counts = stops - starts
        spans = list(zip(batch.reqs, starts.tolist(), stops.tolist(), strict=True))
        ids = torch.tensor([token for span in spans for token in committed_tokens(*span, late)], dtype=torch.int64)
        tokens, positions, owners, ends, last = all_to_device(
            batch.seq_lens.device,
            ids.clamp(max=self._draft_vocab - 1),
            torch.cat([torch.arange(start, stop) for _, start, stop in spans]),
            torch.arange(len(counts)).repeat_interleave(counts),
            stops,
            counts.cumsum(0) - 1,
        )
        rows = batch.req_pool_indices.to(torch.int64)[owners]

        extend = copy.copy(batch)
        extend.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        extend.input_ids = tokens
        extend.seq_lens, extend.seq_lens_cpu = ends, stops
        extend.prefix_lens, extend.extend_lens = starts.tolist(), counts.tolist()
        extend.extend_num_tokens = len(tokens)
        extend.out_cache_loc = self.req_to_token_pool.req_to_token[rows, positions].to(torch.int64)
        extend.spec_info = EagleDraftExtendInput(positions=positions, select_index=last, num_tokens_per_req=1)
        logits = self._forward(extend)
        self.state.mark(extend.out_cache_loc)
        return logits

    def _decode(self, batch: Any, step: int, tokens: torch.Tensor) -> torch.Tensor:
        """One forward over the `step`-th draft of each request, `tokens` int64 [B]; returns logits [B, V]."""
        position = batch.seq_lens.to(torch.int64) + step
        decode = copy.copy(batch)
        decode.forward_mode = ForwardMode.DECODE
        decode.input_ids = tokens.contiguous()
        decode.seq_lens, decode.seq_lens_cpu = position + 1, host_lengths(batch) + step + 1
        decode.out_cache_loc = self._slots(batch, position)
        decode.spec_info = None
        return self._forward(decode)

    def _slots(self, batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """Slots of each request's `positions` (int64 [B] or [B, n]), same shape."""
        rows = batch.req_pool_indices.to(torch.int64)
        rows = rows if positions.dim() == 1 else rows.unsqueeze(1)
        return self.req_to_token_pool.req_to_token[rows, positions].to(torch.int64)

    def _forward(self, batch: Any) -> torch.Tensor:
        """Runs the draft; returns its logits after each request's last token over the common vocabulary, [B, V]."""
        self.forwards += 1
        if self.fused is not None:
            return self._forward_fused(self.fused, batch)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        batch.return_logprob = False
        forward_batch = ForwardBatch.init_new(
            batch, self.draft_runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
        )
        logits = self.draft_runner.forward(forward_batch).logits_output.next_token_logits
        return logits[:, : self._common_vocab]

    def _forward_fused(self, fused: FusedLlama | EmulatedDraft, batch: Any) -> torch.Tensor:
        rows = batch.req_pool_indices.to(torch.int64)
        if batch.forward_mode.is_decode():
            positions = batch.seq_lens - 1
            query_start = torch.arange(len(rows) + 1)
        else:
            positions = batch.spec_info.positions
            query_start = torch.zeros(len(rows) + 1, dtype=torch.int64)
            query_start[1:] = batch.spec_info.select_index + 1
        logits = fused(batch.input_ids, positions, batch.out_cache_loc, rows, query_start, batch.seq_lens)
        return logits[:, : self._common_vocab]
