"""Which KV slots a draft has seen: how far into each request, and the update of that after a round.

What the scan costs is memory traffic: every position up to the first gap takes 4 bytes of
`req_to_token` (8 of int64), in order, and one of `valid`, by slot:

    sum of lengths x 5 bytes    (up to 36 where no two slots of a request share a 32-byte sector)

128 requests of 4,096 tokens are 2.6 MB: 0.5 us at 4.8 TB/s, 4 us in the worst case, 0.13 ms at
20 GB/s. An update reads a slot number and a flag and writes a flag: n x 10 bytes. On a GPU both are
next to nothing beside the launch, so each is one, and neither waits for the device.
"""

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

    CPU: numba. CUDA: Triton, on the current stream. Either compiles at its first call (seconds).

    Args:
        valid: bool [num_slots].
        req_to_token: int32 or int64 [requests, context]: the slot of each position.
        req_pool_indices, seq_lens: int32 or int64 [B].
    Returns:
        int64 [B], on the same device.
    """
    out = torch.empty_like(seq_lens, dtype=torch.int64)
    if valid.is_cuda:
        from sglang_nightjar.kernels.draft_lens_triton import valid_prefix

        valid_prefix(valid, req_to_token, req_pool_indices, seq_lens, out)
    else:
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


def set_valid(valid: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor | bool) -> None:
    """`valid[slots[i]] = seen[i]`: marks and clears in one go, without sorting slots by what they get.

    Args:
        valid: bool [num_slots], contiguous.
        slots: int32 or int64 [...]. A slot that is there twice gets the same flag twice.
        seen: bool, of the shape of `slots`; or one flag for all.
    """
    if valid.is_cuda:
        from sglang_nightjar.kernels.draft_lens_triton import scatter_valid

        scatter_valid(valid, slots.contiguous(), seen.contiguous() if isinstance(seen, torch.Tensor) else seen)
    else:
        valid[slots.long()] = seen
