"""Drafting a chain with an ordinary language model that shares the target's KV slots.

SGLang's STANDALONE worker keeps EAGLE's convention: the draft's slot i holds token i + 1.
That makes a slot's draft KV depend on what came after it, which a shared prefix cannot
promise. Here slot i holds token i, as in the target, so the validity of a slot is a
property of the slot. The draft's first forward of a round covers whatever it lags behind
plus the bonus token; in steady state that is one or two tokens per request.
"""

import copy
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from sglang_nightjar.speculation.draft_state import DraftState


class ChainDraftWorker(StandaloneDraftWorker):
    """Owns the draft model and its KV validity; loading and pools are upstream's."""

    state: DraftState
    forwards = 0

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        pool = self.draft_runner.token_to_kv_pool
        self.state = DraftState(pool.size + pool.page_size)

    def init_attention_backend(self) -> None:
        """The draft runner's own backend serves every step; upstream's per-step backends are not built."""
        self.draft_attn_backend = None
        self.draft_extend_attn_backend = None

    def prefill(self, batch: Any) -> None:
        """Runs the draft over the prompt tokens the target has just written (`batch` in EXTEND mode)."""
        forward_batch = ForwardBatch.init_new(
            batch, self.draft_runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
        )
        forward_batch.return_logprob = False
        self._forward(forward_batch)
        self.state.mark(batch.out_cache_loc)

    def draft_chain(self, batch: Any, gamma: int) -> torch.Tensor:
        """Drafts `gamma` tokens per request, greedily.

        Args:
            batch: a decode batch; `seq_lens` counts the tokens with target KV, `spec_info.bonus_tokens`
                the next one.
        Returns:
            int64 [B, gamma + 1]: the bonus token, then the drafted ones. Their slots hold draft KV, except the
            last one's; `settle` says afterwards which of them count.
        """
        candidates = torch.empty((len(batch.reqs), gamma + 1), dtype=torch.int64)
        candidates[:, 0] = batch.spec_info.bonus_tokens
        candidates[:, 1] = self._catch_up(batch)
        if gamma > 1:
            forward_batch = self._decode_batch(batch, candidates[:, 1])
            for step in range(1, gamma):
                if step > 1:
                    forward_batch.seq_lens = forward_batch.seq_lens + 1
                    forward_batch.seq_lens_cpu = forward_batch.seq_lens_cpu + 1
                    forward_batch.positions = forward_batch.positions + 1
                    forward_batch.input_ids = candidates[:, step].contiguous()
                    forward_batch.out_cache_loc = self._slots(batch, forward_batch.positions)
                candidates[:, step + 1] = self._forward(forward_batch).argmax(-1)
        return candidates

    def settle(self, batch: Any, accept_lens: torch.Tensor, gamma: int) -> None:
        """After verification: of the slots written this round, valid are those of accepted tokens the draft has seen.

        Args:
            accept_lens: int [B], tokens committed: accepted drafts and the new bonus token.
            gamma: tokens drafted; the bonus token and the first gamma - 1 of them went through the draft.
        """
        steps = torch.arange(gamma + 1)
        slots = self._slots(batch, batch.seq_lens.to(torch.int64).unsqueeze(1) + steps)
        seen = steps.unsqueeze(0) < accept_lens.clamp(max=gamma).unsqueeze(1)
        self.state.mark(slots[seen])
        self.state.clear(slots[~seen])

    def _catch_up(self, batch: Any) -> torch.Tensor:
        """One extend over every token the draft has not seen, bonus included; returns its next token, int64 [B]."""
        seq_lens = batch.seq_lens.to(torch.int64)
        lens = self.state.draft_lens(self.req_to_token_pool.req_to_token, batch.req_pool_indices, seq_lens)
        extend_lens = (seq_lens + 1 - lens).tolist()
        prefix_lens = lens.tolist()
        tokens: list[int] = []
        positions: list[int] = []
        for req, prefix, count in zip(batch.reqs, prefix_lens, extend_lens, strict=True):
            tokens.extend(_committed_tokens(req, prefix, prefix + count))
            positions.extend(range(prefix, prefix + count))

        extend = copy.copy(batch)
        extend.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        extend.input_ids = torch.tensor(tokens, dtype=torch.int64)
        extend.seq_lens = batch.seq_lens + 1
        extend.seq_lens_cpu = batch.seq_lens_cpu + 1
        extend.seq_lens_sum = int(extend.seq_lens_cpu.sum())
        extend.prefix_lens, extend.extend_lens = prefix_lens, extend_lens
        extend.extend_num_tokens = len(tokens)
        counts = torch.tensor(extend_lens)
        position_tensor = torch.tensor(positions, dtype=torch.int64)
        rows = torch.repeat_interleave(batch.req_pool_indices.to(torch.int64), counts)
        extend.out_cache_loc = self.req_to_token_pool.req_to_token[rows, position_tensor].to(torch.int64)
        extend.spec_info = EagleDraftExtendInput(
            positions=position_tensor, select_index=counts.cumsum(0) - 1, num_tokens_per_req=1
        )
        forward_batch = self._init_forward_batch(extend)
        next_tokens = self._forward(forward_batch).argmax(-1)
        self.state.mark(extend.out_cache_loc)
        return next_tokens

    def _decode_batch(self, batch: Any, tokens: torch.Tensor) -> Any:
        """The forward batch of the second draft step: one token per request, right after the bonus token."""
        decode = copy.copy(batch)
        decode.forward_mode = ForwardMode.DECODE
        decode.input_ids = tokens.contiguous()
        decode.seq_lens = batch.seq_lens + 2
        decode.seq_lens_cpu = batch.seq_lens_cpu + 2
        decode.seq_lens_sum = int(decode.seq_lens_cpu.sum())
        decode.out_cache_loc = self._slots(batch, batch.seq_lens.to(torch.int64) + 1)
        decode.spec_info = None
        return self._init_forward_batch(decode)

    def _init_forward_batch(self, batch: Any) -> Any:
        forward_batch = ForwardBatch.init_new(
            batch, self.draft_runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
        )
        forward_batch.return_logprob = False
        return forward_batch

    def _slots(self, batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """Slots of each request's `positions` (int64 [B] or [B, n]), same shape."""
        rows = batch.req_pool_indices.to(torch.int64)
        rows = rows if positions.dim() == 1 else rows.unsqueeze(1)
        return self.req_to_token_pool.req_to_token[rows, positions].to(torch.int64)

    def _forward(self, forward_batch: Any) -> torch.Tensor:
        self.forwards += 1
        return self.draft_runner.forward(forward_batch).logits_output.next_token_logits


def _committed_tokens(req: Any, start: int, stop: int) -> list[int]:
    """Tokens at positions `start .. stop` of a request; its last committed token is the bonus token."""
    prompt = req.origin_input_ids
    total = len(prompt) + len(req.output_ids)
    assert stop == total, f"request {req.rid}: {stop} tokens expected, {total} committed"
    first_output = max(start - len(prompt), 0)
    return [*prompt[start:], *req.output_ids[first_output:]]
