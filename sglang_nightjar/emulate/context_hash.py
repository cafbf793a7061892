"""What an emulated model computes: a hash of the context, kept in the KV cache.

A token's K row holds a 64-bit hash of the context up to and including it, its V row another one that follows from
the first. To compute them, the forward reads K and V of the token before, and of a few others of the context that
the hash itself picks (`READS`), all through `req_to_token`, as attention does. So a slot that was lost, stale, or
moved to the wrong place changes everything that is generated after a read of it.

The K row also carries a `mark`: which domain tag the context has shown last (8 bits; 0: none), and 24 bits that are
as good as random, fixed by the first `SETTLED` tokens: who this request is, as far as agreement goes.

Rows are uint32: K = (hash high, hash low, mark, ...), V = (second high, second low, ...).
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from sglang_nightjar.emulate.vocabulary import DOMAINS, FIRST, FIRST_DOMAIN, ORDINARY

Hashes = npt.NDArray[np.uint64]
Marks = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]

READS = 2  # other tokens of the context that each token reads
SETTLED = 32  # tokens after which a request's mark keeps its random bits

_U = np.uint64
_ONE, _LOW, _HALF = _U(1), _U(0xFFFFFFFF), _U(32)
_TOKEN, _POSITION = _U(0x9E3779B97F4A7C15), _U(0xD1B54A32D192ED03)
_M1, _M2, _S1, _S2, _S3 = _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB), _U(30), _U(27), _U(31)
_SECOND = _U(0x2545F4914F6CDD1D)
_MARK_BITS = _U(0xFFFFFF)
_DOMAIN_SHIFT = 24
_FIRST_DOMAIN, _END_DOMAIN = FIRST_DOMAIN, FIRST_DOMAIN + len(DOMAINS)


@numba.njit(cache=True)
def _mix(x):
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a good permutation of 64 bits."""
    x = (x ^ (x >> _S1)) * _M1
    x = (x ^ (x >> _S2)) * _M2
    return x ^ (x >> _S3)


@numba.njit(cache=True)
def _joined(rows, slot):
    return (_U(rows[slot, 0]) << _HALF) | _U(rows[slot, 1])


@numba.njit(cache=True, nogil=True)
def _context_hash(tokens, positions, slots, requests, query_start, req_to_token, k, v, hashes, marks):
    for b in range(requests.shape[0]):
        row = requests[b]
        for i in range(query_start[b], query_start[b + 1]):
            position = positions[i]
            state = ((_U(tokens[i]) + _ONE) * _TOKEN) ^ ((_U(position) + _ONE) * _POSITION)
            mark = np.uint32(0)
            if position > 0:
                before = req_to_token[row, position - 1]
                mark = k[before, 2]
                state = _mix(state ^ _joined(k, before)) + _joined(v, before)
                for _ in range(READS):
                    other = req_to_token[row, np.int64(_mix(state) % _U(position))]
                    state = _mix(state ^ _joined(k, other)) + _joined(v, other)
            state = _mix(state)
            second = _mix(state ^ _SECOND)
            domain = np.uint32(mark >> np.uint32(_DOMAIN_SHIFT))
            if _FIRST_DOMAIN <= tokens[i] < _END_DOMAIN:
                domain = np.uint32(tokens[i] - _FIRST_DOMAIN + 1)
            random = np.uint32(mark & np.uint32(0xFFFFFF))
            if position < SETTLED:
                random = np.uint32(state & _MARK_BITS)
            mark = np.uint32((domain << np.uint32(_DOMAIN_SHIFT)) | random)
            slot = slots[i]
            k[slot, 0], k[slot, 1], k[slot, 2] = state >> _HALF, state & _LOW, mark
            v[slot, 0], v[slot, 1] = second >> _HALF, second & _LOW
            hashes[i], marks[i] = state, mark


def context_hash(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    requests: Ints,
    query_start: Ints,
    req_to_token: npt.NDArray[np.int32],
    k: Marks,
    v: Marks,
) -> tuple[Hashes, Marks]:
    """One forward: writes the rows of its tokens into `k` and `v`.

    Args:
        tokens, positions, slots: int64 [N], of each token; a request's tokens follow one another, each at the
            position after the one before.
        requests: int64 [B], rows of `req_to_token`. query_start: int64 [B + 1], the tokens of each.
        req_to_token: int32 [requests, context], slot of each position.
        k, v: uint32 [slots, at least 3].
    Returns:
        Hash and mark after each token, [N] each.
    """
    hashes, marks = np.empty(len(tokens), np.uint64), np.empty(len(tokens), np.uint32)
    _context_hash(tokens, positions, slots, requests, query_start, req_to_token, k, v, hashes, marks)
    return hashes, marks


def next_tokens(hashes: Hashes, weights: npt.NDArray[np.uint32]) -> Ints:
    """The token that follows each context, int64 of the shape of `hashes`; never a special one.

    Each reads one weight. Where that is not what `weight_values` says, the token is another: a model whose weights
    were not brought back as they were does not go unnoticed.
    """
    tokens: Ints = FIRST + (hashes >> _HALF).astype(np.int64) % ORDINARY
    places = hashes % _U(len(weights))
    return np.where(weights[places] == weight_values(places), tokens, another(tokens, hashes))


def weight_values(places: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint32]:
    """The weights at these places, no two alike: multiples of an odd number modulo 2^32, plus 1."""
    return ((places.astype(np.uint64) * _U(2654435761) + _ONE) & _LOW).astype(np.uint32)


def another(tokens: Ints, hashes: Hashes) -> Ints:
    """A token other than each of `tokens`, chosen by the hash."""
    shift = 1 + (scramble(hashes, 1) >> _HALF).astype(np.int64) % (ORDINARY - 1)
    return FIRST + (tokens - FIRST + shift) % ORDINARY


def uniform(hashes: Hashes, stream: int) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each hash; different streams are independent."""
    return (scramble(hashes, stream) >> _U(11)).astype(np.float64) * 2.0**-53


def scramble(hashes: Hashes, stream: int) -> Hashes:
    """Another hash of each hash."""
    x = hashes + _U(stream * int(_TOKEN) & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> _S1)) * _M1
    x = (x ^ (x >> _S2)) * _M2
    return x ^ (x >> _S3)
