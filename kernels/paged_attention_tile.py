"""The arithmetic of `paged_attention`: query rows of one request against one tile of keys.

The keys of a request are cut into tiles of `TILE`, counted from key 0. `attend_tile` turns a
tile into a partial result per query row (maximum score, sum of the exponentials, values
weighted by them); `fold` merges it into the row's total, tile after tile; `finish` divides.

One row goes through the same operations in the same order whatever else is in the call: the
vector operations of `simd` fix the order inside a tile, masked keys get a weight of exactly
0, and tiles a row cannot see are not folded. So a query has the same bits in a decode, in the
verification of a draft and in a prefill, with any number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32, int64, njit

from sglang_nightjar.kernels import simd

TILE = 128  # keys
STRIP = 16  # keys whose scores a row holds in two vectors
BAD_SLOT = 4  # status of a slot outside the cache


class Problem(NamedTuple):
    """One call. Tensors are flat arrays with the strides (in elements) that index them."""

    q: np.ndarray
    q_row: int
    q_head: int
    k: np.ndarray
    k_slot: int
    k_head: int
    v: np.ndarray
    v_slot: int
    v_head: int
    out: np.ndarray
    out_row: int
    out_head: int
    table: np.ndarray  # req_to_token
    table_row: int
    requests: np.ndarray
    query_start: np.ndarray
    kv_lens: np.ndarray
    slots: int
    kv_heads: int
    group: int  # query heads per KV head
    dim: int
    dim_v: int
    window: int
    scale: float
    cap: float


class Scratch(NamedTuple):
    """A worker's buffers; rows are `block row * dim`, and so on."""

    q: np.ndarray
    keys: np.ndarray  # one tile, [strip, dim, STRIP]
    weights: np.ndarray  # [row, TILE]: scores, then their exponentials
    row_max: np.ndarray
    row_sum: np.ndarray
    values: np.ndarray  # [row, dim_v]: weighted values of one tile
    total_max: np.ndarray
    total_sum: np.ndarray
    total: np.ndarray
    k_base: np.ndarray  # where each key of the tile starts in k
    v_base: np.ndarray


class Block(NamedTuple):
    """Query rows of one request and one KV head."""

    request: int
    head: int
    row: int  # of its first query in q
    queries: int
    position: int  # of its first query in the sequence


@njit(nogil=True)
def make_scratch(p, block_rows):
    rows = block_rows + 3  # the inner loops take four rows at a time
    return Scratch(
        q=np.zeros(rows * p.dim, float32),  # rows that only fill up a four stay finite
        keys=np.empty(TILE * p.dim, float32),
        weights=np.empty(rows * TILE, float32),
        row_max=np.empty(rows, float32),
        row_sum=np.empty(rows, float32),
        values=np.empty(rows * p.dim_v, float32),
        total_max=np.empty(rows, float32),
        total_sum=np.empty(rows, float32),
        total=np.empty(rows * p.dim_v, float32),
        k_base=np.empty(TILE, int64),
        v_base=np.empty(TILE, int64),
    )


@njit(nogil=True)
def load_queries(p, w, block):
    """Copy the block's rows (query-major, then head of the group), scaled."""
    scale = simd.splat(float32(p.scale))
    for r in range(block.queries * p.group):
        source = (block.row + r // p.group) * p.q_row + (block.head * p.group + r % p.group) * p.q_head
        for d in range(0, p.dim, simd.LANES):
            simd.store(w.q, r * p.dim + d, simd.mul(simd.load(p.q, source + d), scale))


@njit(nogil=True)
def clear(p, w, rows):
    """Start the rows' totals."""
    for r in range(rows):
        w.total_max[r] = -np.inf
        w.total_sum[r] = 0
    for i in range(rows * p.dim_v):
        w.total[i] = 0


@njit(nogil=True)
def _locate(p, w, block, first, count, status):
    """Look up where the tile's keys and values are."""
    table = p.requests[block.request] * p.table_row + first
    for t in range(count):
        slot = int64(p.table[table + t])
        if slot < 0 or slot >= p.slots:
            status[0], status[1], status[2] = BAD_SLOT, block.request, slot
            slot = 0
        w.k_base[t] = slot * p.k_slot + block.head * p.k_head
        w.v_base[t] = slot * p.v_slot + block.head * p.v_head
    for t in range(count, TILE):  # the gather reads keys eight at a time
        w.k_base[t] = w.k_base[count - 1]


@njit(nogil=True)
def _gather_keys(p, w, block, first, count):
    """Transpose the tile's keys, so that scores need no sum across lanes.

    Slots lie scattered, which no hardware prefetcher foresees: meanwhile, ask for the tile's
    values and for the next tile's keys.
    """
    base = w.k_base
    ahead = p.requests[block.request] * p.table_row + first + TILE
    ahead_count = min(TILE, block.position + block.queries - first - TILE)
    for t in range(0, count, 8):
        rows = (
            base[t], base[t + 1], base[t + 2], base[t + 3], base[t + 4], base[t + 5], base[t + 6], base[t + 7],
        )  # fmt: skip
        target = t // STRIP * STRIP * p.dim + t % STRIP
        for d in range(0, p.dim, simd.LANES):
            at = (
                rows[0] + d, rows[1] + d, rows[2] + d, rows[3] + d, rows[4] + d, rows[5] + d, rows[6] + d, rows[7] + d,
            )  # fmt: skip
            simd.transpose(p.k, at, w.keys, target + d * STRIP, STRIP)
        for i in range(t, min(t + 8, count)):
            for d in range(0, p.dim_v, 16):
                simd.prefetch(p.v, w.v_base[i] + d)
        for i in range(t, min(t + 8, ahead_count)):
            slot = int64(p.table[ahead + i]) * p.k_slot + block.head * p.k_head
            for d in range(0, p.dim, 16):
                simd.prefetch(p.k, slot + d)


@njit(nogil=True)
def _scores(p, w, begin, end, count):
    """weights[r, t] = q[r] . k[t], summed over the dimensions in order."""
    dim = p.dim
    zero = simd.splat(float32(0.0))
    for t in range(0, count, STRIP):
        for r in range(begin, end, 4):
            a0, a1, b0, b1, c0, c1, d0, d1 = zero, zero, zero, zero, zero, zero, zero, zero
            q, key = r * dim, t * dim
            for _ in range(dim):
                x0, x1 = simd.load(w.keys, key), simd.load(w.keys, key + 8)
                a = simd.splat(w.q[q])
                a0, a1 = simd.fma(a, x0, a0), simd.fma(a, x1, a1)
                b = simd.splat(w.q[q + dim])
                b0, b1 = simd.fma(b, x0, b0), simd.fma(b, x1, b1)
                c = simd.splat(w.q[q + 2 * dim])
                c0, c1 = simd.fma(c, x0, c0), simd.fma(c, x1, c1)
                d = simd.splat(w.q[q + 3 * dim])
                d0, d1 = simd.fma(d, x0, d0), simd.fma(d, x1, d1)
                q += 1
                key += STRIP
            at = r * TILE + t
            simd.store(w.weights, at, a0)
            simd.store(w.weights, at + 8, a1)
            simd.store(w.weights, at + TILE, b0)
            simd.store(w.weights, at + TILE + 8, b1)
            simd.store(w.weights, at + 2 * TILE, c0)
            simd.store(w.weights, at + 2 * TILE + 8, c1)
            simd.store(w.weights, at + 3 * TILE, d0)
            simd.store(w.weights, at + 3 * TILE + 8, d1)


@njit(nogil=True)
def _softmax(p, w, row, low, high, count):
    """Scores of one row to exp(score - max); keys outside [low, high) get exactly 0."""
    at = row * TILE
    end = at + (count + STRIP - 1) // STRIP * STRIP
    if p.cap > 0:
        cap = simd.splat(float32(p.cap))
        for t in range(at, end, simd.LANES):
            simd.store(w.weights, t, simd.mul(cap, simd.tanh(simd.div(simd.load(w.weights, t), cap))))
    for t in range(at, at + low):
        w.weights[t] = -np.inf
    for t in range(at + high, end):
        w.weights[t] = -np.inf
    largest = simd.splat(float32(-np.inf))
    for t in range(at, end, simd.LANES):
        largest = simd.at_least(largest, simd.load(w.weights, t))
    row_max = simd.lane_max(largest)
    largest = simd.splat(row_max)
    total = simd.splat(float32(0.0))
    for t in range(at, end, simd.LANES):
        weight = simd.exp(simd.sub(simd.load(w.weights, t), largest))
        simd.store(w.weights, t, weight)
        total = simd.add(total, weight)
    w.row_max[row] = row_max
    w.row_sum[row] = simd.lane_sum(total)


@njit(nogil=True)
def _weighted_values(p, w, begin, end, count):
    """values[r] = sum over t of weights[r, t] * v[t], in order of t."""
    dim = p.dim_v
    zero = simd.splat(float32(0.0))
    for column in range(0, dim, 16):
        second = 8 if column + 8 < dim else 0  # a lone last vector is computed twice
        for r in range(begin, end, 4):
            a0, a1, b0, b1, c0, c1, d0, d1 = zero, zero, zero, zero, zero, zero, zero, zero
            at = r * TILE
            for t in range(count):
                v = w.v_base[t] + column
                x0, x1 = simd.load(p.v, v), simd.load(p.v, v + second)
                a = simd.splat(w.weights[at + t])
                a0, a1 = simd.fma(a, x0, a0), simd.fma(a, x1, a1)
                b = simd.splat(w.weights[at + TILE + t])
                b0, b1 = simd.fma(b, x0, b0), simd.fma(b, x1, b1)
                c = simd.splat(w.weights[at + 2 * TILE + t])
                c0, c1 = simd.fma(c, x0, c0), simd.fma(c, x1, c1)
                d = simd.splat(w.weights[at + 3 * TILE + t])
                d0, d1 = simd.fma(d, x0, d0), simd.fma(d, x1, d1)
            o = r * dim + column
            simd.store(w.values, o, a0)
            simd.store(w.values, o + second, a1)
            simd.store(w.values, o + dim, b0)
            simd.store(w.values, o + dim + second, b1)
            simd.store(w.values, o + 2 * dim, c0)
            simd.store(w.values, o + 2 * dim + second, c1)
            simd.store(w.values, o + 3 * dim, d0)
            simd.store(w.values, o + 3 * dim + second, d1)


@njit(nogil=True)
def attend_tile(p, w, block, tile, status):
    """One tile's partial results; the range of block rows that see any of its keys."""
    first = tile * TILE
    begin = max(0, first - block.position)
    end = block.queries
    if p.window >= 0:
        end = min(end, first + TILE + p.window - block.position)
    count = min(TILE, block.position + end - first)
    _locate(p, w, block, first, count, status)
    _gather_keys(p, w, block, first, count)
    _scores(p, w, begin * p.group, end * p.group, count)
    for j in range(begin, end):
        position = block.position + j
        low = max(0, position - p.window - first) if p.window >= 0 else 0
        high = min(count, position + 1 - first)
        for row in range(j * p.group, (j + 1) * p.group):
            _softmax(p, w, row, low, high, count)
    _weighted_values(p, w, begin * p.group, end * p.group, count)
    return begin * p.group, end * p.group


@njit(nogil=True)
def fold(p, w, row, tile_max, tile_sum, values, at):
    """Merge a tile's partial result `values[at:]` into the row's total."""
    new_max = max(w.total_max[row], tile_max)
    keep = simd.exp(simd.splat(w.total_max[row] - new_max))
    take = simd.exp(simd.splat(tile_max - new_max))
    w.total_max[row] = new_max
    w.total_sum[row] = w.total_sum[row] * simd.first(keep) + tile_sum * simd.first(take)
    for d in range(row * p.dim_v, (row + 1) * p.dim_v, simd.LANES):
        old = simd.mul(simd.load(w.total, d), keep)
        simd.store(w.total, d, simd.fma(simd.load(values, at), take, old))
        at += simd.LANES


@njit(nogil=True)
def finish(p, w, block):
    """Write the block's rows to the output."""
    for r in range(block.queries * p.group):
        to = (block.row + r // p.group) * p.out_row + (block.head * p.group + r % p.group) * p.out_head
        total = simd.splat(w.total_sum[r])
        for d in range(0, p.dim_v, simd.LANES):
            simd.store(p.out, to + d, simd.div(simd.load(w.total, r * p.dim_v + d), total))
