"""What a chain round carries through SGLang's scheduler: draft input in, verify input out."""

import copy
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput

from sglang_nightjar.speculation.transfer import host_lengths


class ChainDraftInput(EagleDraftInput):
    """State between rounds: each request's bonus token (int [B]), the one committed without KV yet.

    An ordinary draft model needs nothing else, so the tensors that EAGLE drafts pass
    along stay None and batch surgery touches `bonus_tokens` alone. With overlap scheduling it touches upstream's
    `future_indices`, by which the scheduler finds the bonus tokens just before the step.
    """

    bonus_tokens: torch.Tensor

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        if self.future_indices is not None:
            super().filter_batch(new_indices, new_indices_cpu)
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, spec_info: EagleDraftInput) -> None:
        if self.future_indices is not None:
            super().merge_batch(spec_info)
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, spec_info.bonus_tokens.to(self.bonus_tokens.dtype)])


def chain_verify_input(candidates: torch.Tensor, seq_lens: torch.Tensor) -> EagleVerifyInput:
    """Verify input of a chain, for an attention backend that takes a chain to be causal: it has no mask.

    Args:
        candidates: int64 [B, gamma + 1]: the bonus token, then the drafted ones.
        seq_lens: int64 [B]: tokens with KV, the bonus token's position.
    """
    batch_size, width = candidates.shape
    device = candidates.device
    steps = torch.arange(width, device=device)
    successor = torch.where(steps + 1 < width, steps + 1, -1)
    return EagleVerifyInput(
        draft_token=candidates.flatten(),
        custom_mask=torch.empty(0, dtype=torch.bool, device=device),
        positions=(seq_lens.to(torch.int64).unsqueeze(1) + steps).flatten(),
        retrieve_index=torch.arange(batch_size * width, device=device).view(batch_size, width),
        retrieve_next_token=successor.repeat(batch_size, 1),
        retrieve_next_sibling=torch.full((batch_size, width), -1, dtype=torch.long, device=device),
        retrieve_cum_len=None,
        spec_steps=width - 1,
        topk=1,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def plain_decode(batch: Any, req_to_token: torch.Tensor) -> Any:
    """`batch`, an SGLang decode batch, as a server without speculation has it: each request's bonus token is computed,
    at its next position.

    Args:
        req_to_token: int32 [requests, context], slots by row and position.
    """
    seq_lens, rows = batch.seq_lens.to(torch.int64), batch.req_pool_indices.to(torch.int64)
    decode = copy.copy(batch)
    decode.forward_mode = ForwardMode.DECODE
    decode.input_ids = batch.spec_info.bonus_tokens.to(torch.int64)
    decode.out_cache_loc = req_to_token[rows, seq_lens].to(torch.int64)
    decode.seq_lens = seq_lens + 1
    decode.seq_lens_cpu = decode.seq_lens if seq_lens.device.type == "cpu" else host_lengths(batch) + 1
    decode.seq_lens_sum = int(decode.seq_lens_cpu.sum())
    decode.spec_info = None
    return decode
