"""The hash that makes one random number of a request's seed, a position and a token, on the CPU.

MurmurHash3 (32 bits, seed 0; Austin Appleby, public domain) of four words: the low and the
high half of the request's seed, the position, the token. Nothing else enters, so a seeded
sample does not depend on the batch, nor on how many tokens are verified at once.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, uint32

_C1, _C2, _ADD = 0xCC9E2D51, 0x1B873593, 0xE6546B64
_F1, _F2 = 0x85EBCA6B, 0xC2B2AE35
_BYTES = 16  # hashed


# numba widens what it computes from 32-bit integers, so every step is cut back to 32 bits.
@njit(cache=True, inline="always")
def _mix(h, word):
    k = uint32(word * uint32(_C1))
    k = uint32(uint32(k << 15) | (k >> 17))
    h = uint32(h ^ uint32(k * uint32(_C2)))
    h = uint32(uint32(h << 13) | (h >> 19))
    return uint32(h * uint32(5) + uint32(_ADD))


@njit(cache=True, nogil=True)
def _hash_rows(seeds, positions, tokens, out):
    for row in range(out.shape[0]):
        head = _mix(uint32(0), uint32(seeds[row]))
        head = _mix(head, uint32(seeds[row] >> np.uint64(32)))
        head = _mix(head, uint32(positions[row]))
        for column in range(out.shape[1]):
            h = uint32(_mix(head, uint32(tokens[column])) ^ uint32(_BYTES))
            h = uint32(uint32(h ^ (h >> 16)) * uint32(_F1))
            h = uint32(uint32(h ^ (h >> 13)) * uint32(_F2))
            out[row, column] = h ^ (h >> 16)


def seed_hash(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hashes every row's seed and position with every token.

    Args:
        seed: uint64 [n].
        positions: int64 [n], each 0 or more and below 2**32.
        col_indices: int64 [m], the tokens.

    Returns:
        uint32 [n, m].
    """
    out = torch.empty((len(seed), len(col_indices)), dtype=torch.uint32)
    _hash_rows(seed.numpy(), positions.numpy(), col_indices.numpy(), out.numpy())
    return out
