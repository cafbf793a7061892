"""The numba side of `paged_attention`: cutting a call into items and sharing them out.

A block (query rows of one request, one KV head) is one item, unless there are fewer than
`ITEMS_PER_WORKER` blocks per worker, as in a decode of one request: then a block's key tiles
are dealt out as several items. Their partial results are kept per tile, and whoever finishes
a block's last item folds them in tile order, so splitting changes no bit of the result.
Workers take items from a shared counter, large ones first.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import float32, int64, njit, prange

from sglang_nightjar.kernels import paged_attention_tile as tile
from sglang_nightjar.kernels import simd
from sglang_nightjar.kernels.paged_attention_tile import (
    BAD_SLOT,
    TILE,
    Block,
    Problem,
    attend_tile,
    clear,
    finish,
    fold,
    load_queries,
    make_scratch,
)

BLOCK_ROWS = 48  # query rows (queries x heads of the group) that share one gathered key tile
ITEMS_PER_WORKER = 4
PARTIAL_FLOATS = 1 << 20  # most memory that splitting may take: 4 MiB
SERIAL_COST = 64  # below this many rows x tiles, starting a second thread costs more than it saves
GATHER_COST = 8  # gathering a tile, in rows of arithmetic on it

# What `attend` finds wrong with the values of its index arrays (then: request, value).
OK, BAD_QUERY_START, BAD_REQUEST, BAD_KV_LEN = range(4)  # and BAD_SLOT

__all__ = ["BAD_KV_LEN", "BAD_QUERY_START", "BAD_REQUEST", "BAD_SLOT", "OK", "attend"]

# Columns of the table of blocks.
REQUEST, HEAD, ROW, QUERIES, POSITION, TILE_LOW, TILE_HIGH, PARTIAL, PENDING = range(9)


@njit(nogil=True)
def _check(p, rows, table_rows, table_columns, status):
    """True if the index arrays describe a legal call; else says in `status` what is wrong."""
    batch = p.requests.size
    if p.query_start[0] != 0 or p.query_start[batch] != rows:
        status[0], status[1], status[2] = BAD_QUERY_START, batch, p.query_start[batch]
        return False
    for b in range(batch):
        queries = p.query_start[b + 1] - p.query_start[b]
        if queries < 0:
            status[0], status[1], status[2] = BAD_QUERY_START, b, queries
        elif queries == 0:
            continue
        elif p.requests[b] < 0 or p.requests[b] >= table_rows:
            status[0], status[1], status[2] = BAD_REQUEST, b, p.requests[b]
        elif p.kv_lens[b] < queries or p.kv_lens[b] > table_columns:
            status[0], status[1], status[2] = BAD_KV_LEN, b, p.kv_lens[b]
        if status[0] != OK:
            return False
    return True


@njit(nogil=True)
def _cut_blocks(p, most):
    """The table of blocks; no block has more than `most` queries."""
    count = 0
    for b in range(p.requests.size):
        count += (p.query_start[b + 1] - p.query_start[b] + most - 1) // most
    blocks = np.zeros((count * p.kv_heads, PENDING + 1), int64)
    i = 0
    for b in range(p.requests.size):
        start, end = p.query_start[b], p.query_start[b + 1]
        pieces = (end - start + most - 1) // most
        for piece in range(pieces):
            low = start + (end - start) * piece // pieces
            high = start + (end - start) * (piece + 1) // pieces
            position = p.kv_lens[b] - (end - low)
            for head in range(p.kv_heads):
                block = blocks[i]
                block[REQUEST], block[HEAD], block[ROW], block[QUERIES] = b, head, low, high - low
                block[POSITION] = position
                block[TILE_LOW] = max(0, position - p.window) // TILE if p.window >= 0 else 0
                block[TILE_HIGH] = (position + high - low - 1) // TILE + 1
                block[PARTIAL] = -1
                i += 1
    return blocks


@njit(nogil=True)
def _split(p, blocks, parts):
    """Mark blocks to be cut into `parts` along the keys; the floats their partial results take."""
    floats = 0
    for block in blocks:
        tiles = block[TILE_HIGH] - block[TILE_LOW]
        block[PENDING] = min(parts, tiles)
        if block[PENDING] > 1:
            block[PARTIAL] = floats
            floats += tiles * block[QUERIES] * p.group * (p.dim_v + 2)
    if floats > PARTIAL_FLOATS:
        floats = 0
        for block in blocks:
            block[PENDING], block[PARTIAL] = 1, -1
    return floats


@njit(nogil=True)
def _list_items(p, blocks):
    """(block, first tile, end tile) of every item, and an order of the items, roughly costliest first."""
    count = 0
    for block in blocks:
        count += block[PENDING]
    items = np.empty((count, 3), int64)
    cost = np.empty(count, int64)
    total = 0
    i = 0
    for index in range(len(blocks)):
        block = blocks[index]
        low, tiles, parts = block[TILE_LOW], block[TILE_HIGH] - block[TILE_LOW], block[PENDING]
        for part in range(parts):
            items[i, 0] = index
            items[i, 1] = low + tiles * part // parts
            items[i, 2] = low + tiles * (part + 1) // parts
            cost[i] = (items[i, 2] - items[i, 1]) * (block[QUERIES] * p.group + GATHER_COST)
            total += cost[i]
            i += 1
    order = np.empty(count, int64)
    taken = 0
    ceiling = np.iinfo(np.int64).max
    while taken < count:  # one round per power of two among the costs
        floor = 0
        for c in cost:
            if c < ceiling:
                floor = max(floor, c)
        floor = floor // 2 + 1
        for i in range(count):
            if floor <= cost[i] < ceiling:
                order[taken] = i
                taken += 1
        ceiling = floor
    return items, order, total


@njit(nogil=True)
def _work(p, blocks, items, order, partial, block_rows, counter, status):
    """Take items until none is left."""
    w = make_scratch(p, block_rows)
    width = p.dim_v + 2  # a partial result: values, maximum, sum
    while True:
        taken = simd.fetch_add(counter, 0, 1)
        if taken >= order.size:
            return
        item = items[order[taken]]
        row = blocks[item[0]]
        block = Block(row[REQUEST], row[HEAD], row[ROW], row[QUERIES], row[POSITION])
        rows = block.queries * p.group
        load_queries(p, w, block)
        clear(p, w, rows)
        for t in range(item[1], item[2]):
            begin, end = attend_tile(p, w, block, t, status)
            if row[PARTIAL] < 0:
                for r in range(begin, end):
                    fold(p, w, r, w.row_max[r], w.row_sum[r], w.values, r * p.dim_v)
                continue
            at = row[PARTIAL] + (t - row[TILE_LOW]) * rows * width
            for r in range(rows):
                to = at + r * width
                if begin <= r < end:
                    for d in range(p.dim_v):
                        partial[to + d] = w.values[r * p.dim_v + d]
                    partial[to + p.dim_v] = w.row_max[r]
                    partial[to + p.dim_v + 1] = w.row_sum[r]
                else:
                    partial[to + p.dim_v + 1] = 0  # sees nothing of the tile
        if row[PARTIAL] < 0:
            finish(p, w, block)
        elif simd.fetch_add(blocks.ravel(), item[0] * blocks.shape[1] + PENDING, -1) == 1:
            for i in range((row[TILE_HIGH] - row[TILE_LOW]) * rows):
                at = row[PARTIAL] + i * width
                if partial[at + p.dim_v + 1] != 0:
                    fold(p, w, i % rows, partial[at + p.dim_v], partial[at + p.dim_v + 1], partial, at)
            finish(p, w, block)


def _compile(sources: str) -> Any:
    """`attend`, cached under a key that includes `sources`.

    numba's cache looks for changes in this file alone, but takes free variables into its key.
    """

    @njit(parallel=True, nogil=True, cache=True)
    def attend(
        q, q_row, q_head, k, k_slot, k_head, v, v_slot, v_head, out, out_row, out_head, table, table_row, requests,
        query_start, kv_lens, rows, batch, table_rows, table_columns, slots, kv_heads, group, dim, dim_v, window, scale,
        cap, threads,
    ):  # fmt: skip
        """Fill `out`; the status (kind, request, value), of kind `OK` if all is well.

        Tensors come as addresses, with their strides in elements.
        """
        _ = sources
        p = Problem(
            simd.float32_at(q, rows * q_row), q_row, q_head,
            simd.float32_at(k, slots * k_slot), k_slot, k_head,
            simd.float32_at(v, slots * v_slot), v_slot, v_head,
            simd.float32_at(out, rows * out_row), out_row, out_head,
            simd.int32_at(table, table_rows * table_row), table_row,
            simd.int64_at(requests, batch), simd.int64_at(query_start, batch + 1), simd.int64_at(kv_lens, batch),
            slots, kv_heads, group, dim, dim_v, window, float32(scale), float32(cap),
        )  # fmt: skip
        status = np.zeros(3, int64)
        if not _check(p, rows, table_rows, table_columns, status):
            return status[0], status[1], status[2]
        blocks = _cut_blocks(p, max(1, BLOCK_ROWS // group))
        block_rows = 0
        for block in blocks:
            block_rows = max(block_rows, block[QUERIES] * group)
        parts = 1
        if threads > 1 and 0 < len(blocks) < ITEMS_PER_WORKER * threads:
            parts = (ITEMS_PER_WORKER * threads + len(blocks) - 1) // len(blocks)
        partial = np.empty(_split(p, blocks, parts), float32)
        items, order, cost = _list_items(p, blocks)
        workers = min(threads, order.size)
        counter = np.zeros(1, int64)
        if workers <= 1 or cost < SERIAL_COST:
            _work(p, blocks, items, order, partial, block_rows, counter, status)
        else:
            for _ in prange(workers):
                _work(p, blocks, items, order, partial, block_rows, counter, status)
        return status[0], status[1], status[2]

    return attend


attend = _compile("".join(sha256(Path(file).read_bytes()).hexdigest() for file in (simd.__file__, tile.__file__)))
