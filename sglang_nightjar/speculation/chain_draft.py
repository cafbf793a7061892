"""Drafting a chain with an ordinary language model that shares the target's KV slots.

SGLang's STANDALONE worker keeps EAGLE's convention: the draft's slot i holds token i + 1.
That makes a slot's draft KV depend on what came after it, which a shared prefix cannot
promise. Here slot i holds token i, as in the target, so the validity of a slot is a
property of the slot. The draft's first forward of a step is always the same one: an extend
over every committed token it has not seen. In a prefill that is the prompt; in a decode
round it is the bonus token, and the last draft of the round before if that was accepted.
"""

import copy
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from sglang_nightjar.speculation.draft_state import DraftState


class ChainDraftWorker(StandaloneDraftWorker):
    """Owns the draft model and the validity of its KV; loading and pools are upstream's.

    Attributes:
        state: which slots hold draft KV.
        forwards: draft forwards run so far.
    """

    state: DraftState
    forwards = 0

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        pool = self.draft_runner.token_to_kv_pool
        self.state = DraftState(pool.size + pool.page_size)
        # Padded sizes may differ although the tokenizer is one: draft no token the target
        # lacks, and read none the draft lacks.
        self._draft_vocab = self.draft_runner.model_config.vocab_size
        self._common_vocab = min(self._draft_vocab, self.target_worker.model_runner.model_config.vocab_size)

    def init_attention_backend(self) -> None:
        """The draft runner's own backend serves every step; upstream's per-step backends are not built."""
        self.draft_attn_backend = None
        self.draft_extend_attn_backend = None

    def prefill(self, batch: Any) -> None:
        """Runs the draft over what the target has just prefilled (`batch` in EXTEND mode).

        It starts where the draft's own KV ends, which may lie inside a cached prefix: the last
        token of an earlier request is often one that only the target has seen.
        """
        self.state.clear(batch.out_cache_loc)
        self._extend(batch, batch.seq_lens.to(torch.int64))

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
        candidates[:, 1] = self._extend(batch, batch.seq_lens.to(torch.int64) + 1)
        for step in range(1, gamma):
            candidates[:, step + 1] = self._decode(batch, step, candidates[:, step])
        return candidates

    def settle(self, batch: Any, accept_lens: torch.Tensor, gamma: int) -> None:
        """After verification: of the slots written this round, valid are those of accepted tokens the draft has seen.

        Args:
            batch: the batch of `draft_chain`, its `seq_lens` still those of before the round.
            accept_lens: int [B], tokens committed: accepted drafts and the new bonus token.
            gamma: tokens drafted; the bonus token and the first gamma - 1 of them went through the draft.
        """
        steps = torch.arange(gamma + 1)
        slots = self._slots(batch, batch.seq_lens.to(torch.int64).unsqueeze(1) + steps)
        seen = steps < accept_lens.clamp(max=gamma).unsqueeze(1)
        self.state.mark(slots[seen])
        self.state.clear(slots[~seen])

    def _extend(self, batch: Any, stops: torch.Tensor) -> torch.Tensor:
        """One forward over each request's tokens from the end of its draft KV up to `stops` (exclusive).

        Args:
            stops: int64 [B]; the token before each is committed, and its slot is the request's own.
        Returns:
            int64 [B]: the draft's choice of each next token.
        """
        starts = self.state.draft_lens(self.req_to_token_pool.req_to_token, batch.req_pool_indices, stops - 1)
        counts = stops - starts
        spans = list(zip(batch.reqs, starts.tolist(), stops.tolist(), strict=True))
        tokens = torch.tensor([token for span in spans for token in _committed_tokens(*span)], dtype=torch.int64)
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        rows = batch.req_pool_indices.to(torch.int64).repeat_interleave(counts)

        extend = copy.copy(batch)
        extend.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        extend.input_ids = tokens.clamp(max=self._draft_vocab - 1)
        extend.seq_lens = stops
        extend.prefix_lens, extend.extend_lens = starts.tolist(), counts.tolist()
        extend.extend_num_tokens = len(tokens)
        extend.out_cache_loc = self.req_to_token_pool.req_to_token[rows, positions].to(torch.int64)
        extend.spec_info = EagleDraftExtendInput(
            positions=positions, select_index=counts.cumsum(0) - 1, num_tokens_per_req=1
        )
        next_tokens = self._forward(extend)
        self.state.mark(extend.out_cache_loc)
        return next_tokens

    def _decode(self, batch: Any, step: int, tokens: torch.Tensor) -> torch.Tensor:
        """One forward over the `step`-th draft of each request, `tokens` int64 [B]; returns the next, int64 [B]."""
        position = batch.seq_lens.to(torch.int64) + step
        decode = copy.copy(batch)
        decode.forward_mode = ForwardMode.DECODE
        decode.input_ids = tokens.contiguous()
        decode.seq_lens = position + 1
        decode.out_cache_loc = self._slots(batch, position)
        decode.spec_info = None
        return self._forward(decode)

    def _slots(self, batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """Slots of each request's `positions` (int64 [B] or [B, n]), same shape."""
        rows = batch.req_pool_indices.to(torch.int64)
        rows = rows if positions.dim() == 1 else rows.unsqueeze(1)
        return self.req_to_token_pool.req_to_token[rows, positions].to(torch.int64)

    def _forward(self, batch: Any) -> torch.Tensor:
        """Runs the draft; returns its choice after each request's last token, int64 [B]."""
        self.forwards += 1
        batch.seq_lens_cpu = batch.seq_lens
        batch.seq_lens_sum = int(batch.seq_lens.sum())
        batch.return_logprob = False
        forward_batch = ForwardBatch.init_new(
            batch, self.draft_runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
        )
        logits = self.draft_runner.forward(forward_batch).logits_output.next_token_logits
        return logits[:, : self._common_vocab].argmax(-1)


def _committed_tokens(req: Any, start: int, stop: int) -> list[int]:
    """Tokens at positions `start` up to `stop` of a request; the last of all is the bonus token."""
    prompt = req.origin_input_ids
    first_output, last_output = max(start - len(prompt), 0), max(stop - len(prompt), 0)
    tokens = [*prompt[start:stop], *req.output_ids[first_output:last_output]]
    assert len(tokens) == stop - start, f"request {req.rid}: tokens {start} to {stop} asked, {len(tokens)} committed"
    return tokens
