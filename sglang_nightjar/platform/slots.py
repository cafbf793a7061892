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


def last_slots(
    req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor
) -> torch.Tensor:
    """Slot of each request's last position, -1 where it has none, int64 [B].

    Replaces `mem_cache.allocation.get_last_loc` (same arguments), which paged allocation calls under speculation.
    """
    last = (prefix_lens_tensor.to(torch.int64) - 1).clamp(min=0)
    slots = req_to_token[req_pool_indices_tensor.to(torch.int64), last].to(torch.int64)
    return torch.where(prefix_lens_tensor > 0, slots, -1)
