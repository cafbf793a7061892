"""Draft validity: one bool per KV slot says whether the draft's KV there belongs to the slot's token.

Draft and target share slot numbers but fill their own buffers. A slot is valid once the
draft's forward wrote it for the token the target has there, and stops being valid when
the target alone writes it. Every slot is written by the target before it is read, so a
freed slot needs no clearing: its next owner's write decides.
"""

import torch

from sglang_nightjar.kernels.draft_lens import draft_lens, set_valid


class DraftState:
    """Validity of the draft's KV, by slot. `losses`: how often all of it was given up."""

    losses = 0

    def __init__(self, num_slots: int, device: torch.device | str = "cpu") -> None:
        self._valid = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def mark(self, slots: torch.Tensor) -> None:
        """The draft wrote these slots for their present tokens."""
        set_valid(self._valid, slots, True)

    def clear(self, slots: torch.Tensor) -> None:
        """Only the target wrote these slots, or the draft wrote them for tokens that were rejected."""
        set_valid(self._valid, slots, False)

    def set(self, slots: torch.Tensor, seen: torch.Tensor) -> None:
        """The one where `seen` (bool, of the shape of `slots`), the other where not; no slot is there twice."""
        set_valid(self._valid, slots, seen)

    def clear_all(self) -> None:
        """The draft's KV is gone, or about to be."""
        self._valid.zero_()
        self.losses += 1

    def draft_lens(
        self, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor:
        """Leading positions of each request the draft has seen, int64 [B]; `seq_lens` minus it is the lag."""
        return draft_lens(self._valid, req_to_token, req_pool_indices, seq_lens)
