"""KV slot bookkeeping that SGLang does in Triton, in plain torch for CPU tensors."""

import torch


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Slots of each request's positions `start .. start + draft_token_num`, int64 [B * draft_token_num].

    Upstream seam: `SRTPlatform.get_speculative_cache_locs_fn`.
    """
    columns = start_offset.to(torch.int64).unsqueeze(1) + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.to(torch.int64).unsqueeze(1), columns].to(torch.int64).flatten()


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Writes each request's newly allocated slots into its row, positions `start .. end`.

    Replaces `mem_cache.allocation.assign_req_to_token_pool_func` (same arguments).
    """
    lengths = (end_offset - start_offset).to(torch.int64)
    rows = torch.repeat_interleave(req_pool_indices.to(torch.int64), lengths)
    first = torch.repeat_interleave(torch.cumsum(lengths, 0) - lengths, lengths)
    columns = torch.arange(rows.numel()) - first + torch.repeat_interleave(start_offset.to(torch.int64), lengths)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)
