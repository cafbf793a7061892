"""How far a draft has seen each request: the length of the valid prefix of its KV slots."""

import numba
import torch


@numba.njit(cache=True, nogil=True)
def _valid_prefix(valid, req_to_token, rows, seq_lens, out):
    for b in range(rows.shape[0]):
        row = rows[b]
        length = 0
        while length < seq_lens[b] and valid[req_to_token[row, length]]:
            length += 1
        out[b] = length


def draft_lens(
    valid: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """First position of each request whose slot is not valid, or its `seq_len` where all are.

    Args:
        valid: bool [num_slots].
        req_to_token: int32 [requests, context]: the slot of each position.
        req_pool_indices, seq_lens: int64 [B].
    Returns:
        int64 [B].
    """
    out = torch.empty_like(seq_lens, dtype=torch.int64)
    _valid_prefix(valid.numpy(), req_to_token.numpy(), req_pool_indices.numpy(), seq_lens.numpy(), out.numpy())
    return out


def draft_lens_reference(
    valid: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """The same, one request at a time in plain torch."""
    lengths = []
    for row, seq_len in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        seen = valid[req_to_token[row, :seq_len].long()]
        lengths.append(int(seen.long().cumprod(0).sum()))
    return torch.tensor(lengths, dtype=torch.int64)
