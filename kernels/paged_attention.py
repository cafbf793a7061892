"""Attention of new query rows over a paged KV cache, on the CPU.

SGLang keeps one table row per request, `req_to_token`, that names the KV slot of each of its
tokens, and one K and one V buffer per layer indexed by slot. That makes one rule enough for
prefill (with or without a cached prefix), decode, verification of a draft chain and decoding
with the draft itself: of the n queries of a request, the last sees all `kv_lens` keys and
each earlier one sees one key less.
"""

from __future__ import annotations

import torch
from numba import get_num_threads

from sglang_nightjar.kernels import paged_attention_cpu as cpu
from sglang_nightjar.kernels.simd import LANES


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    query_start: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    window: int = -1,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Causal attention over the cache with a numba kernel.

    A query gives the same bits whatever else is in the call: alone in a decode, inside the
    verification of a draft, inside a prefill, with one thread or more.

    Runs on `numba.get_num_threads()` threads and sets nothing global. torch and numba's `omp`
    layer each have their own OpenMP pool, whose idle threads spin unless the process starts
    with OMP_WAIT_POLICY=PASSIVE. That layer does not survive a fork: start children with spawn.
    numba's `workqueue` layer ends the process if two Python threads call this at once; `omp`
    and `tbb` do not. The first call of all compiles (about half a minute) and is cached.

    Splitting the keys of few queries takes at most 4 MiB; a call needs no other memory that
    grows with the keys.

    Args:
        q: [T, Hq, D] float32, the query rows of all requests, in request order.
        k_cache: [S, Hkv, D] float32, one layer's keys by KV slot; Hkv divides Hq.
        v_cache: [S, Hkv, Dv] float32, the values.
        req_to_token: [R, C] int32, the KV slot of each token of each request.
        req_pool_indices: [B] int32 or int64, each request's row of `req_to_token`.
        query_start: [B + 1] int32 or int64, request b owns query_start[b] : query_start[b + 1].
        kv_lens: [B] int32 or int64, how many keys the last query of each request sees.
        scale: factor on q . k.
        out: where to put the result; by default a new tensor.
        window: if 0 or more, a query at position p sees only keys p - window to p.
        logit_cap: if above 0, scores become cap * tanh(score / cap).

    D and Dv must be multiples of 8. The tensors may be strided views, except in the last
    dimension; nothing is copied.

    Returns:
        [T, Hq, Dv] float32.

    Raises:
        ValueError: a shape, type, stride or index that does not fit, naming the argument.
    """
    rows, heads, dim = _shape("q", q, 3, torch.float32)
    slots, kv_heads, key_dim = _shape("k_cache", k_cache, 3, torch.float32)
    value_slots, value_heads, dim_v = _shape("v_cache", v_cache, 3, torch.float32)
    table_rows, columns = _shape("req_to_token", req_to_token, 2, torch.int32)
    (batch,) = _shape("req_pool_indices", req_pool_indices, 1)
    (bounds,) = _shape("query_start", query_start, 1)
    (lens,) = _shape("kv_lens", kv_lens, 1)
    if key_dim != dim or dim % LANES:
        raise ValueError(f"k_cache has head dimension {key_dim}, q has {dim}; equal multiples of {LANES} are needed")
    if dim_v % LANES:
        raise ValueError(f"v_cache has head dimension {dim_v}; a multiple of {LANES} is needed")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k_cache has {kv_heads} heads; they must divide the {heads} heads of q")
    if value_slots != slots or value_heads != kv_heads:
        raise ValueError(f"v_cache is {tuple(v_cache.shape)}; k_cache has {slots} slots of {kv_heads} heads")
    if slots == 0 and rows:
        raise ValueError("k_cache has no slots")
    if bounds != batch + 1:
        raise ValueError(f"query_start has {bounds} elements; {batch} requests need {batch + 1}")
    if lens != batch:
        raise ValueError(f"kv_lens has {lens} elements; there are {batch} requests")
    if out is None:
        out = q.new_empty((rows, heads, dim_v))
    elif _shape("out", out, 3, torch.float32) != (rows, heads, dim_v):
        raise ValueError(f"out is {tuple(out.shape)}; the result is {(rows, heads, dim_v)}")
    requests, starts, lengths = _int64(req_pool_indices), _int64(query_start), _int64(kv_lens)
    kind, b, value = cpu.attend(
        *(q.data_ptr(), q.stride(0), q.stride(1)),
        *(k_cache.data_ptr(), k_cache.stride(0), k_cache.stride(1)),
        *(v_cache.data_ptr(), v_cache.stride(0), v_cache.stride(1)),
        *(out.data_ptr(), out.stride(0), out.stride(1)),
        *(req_to_token.data_ptr(), req_to_token.stride(0)),
        *(requests.data_ptr(), starts.data_ptr(), lengths.data_ptr()),
        *(rows, batch, table_rows, columns, slots),
        *(kv_heads, heads // kv_heads, dim, dim_v),
        *(int(window), float(scale), float(logit_cap), get_num_threads()),
    )
    if kind == cpu.BAD_QUERY_START:
        raise ValueError(f"query_start is {starts.tolist()}; it must rise from 0 to the {rows} rows of q")
    if kind == cpu.BAD_REQUEST:
        raise ValueError(f"req_pool_indices[{b}] is {value}; req_to_token has {table_rows} rows")
    if kind == cpu.BAD_KV_LEN:
        queries = int(starts[b + 1] - starts[b])
        raise ValueError(
            f"kv_lens[{b}] is {value}; it must be from {queries} (its queries) to {columns} (req_to_token)"
        )
    if kind == cpu.BAD_SLOT:
        raise ValueError(f"req_to_token has slot {value} for request {b}; k_cache has {slots} slots")
    return out


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    query_start: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    window: int = -1,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """`paged_attention` in plain torch, computed in float64; slow, checks nothing."""
    group = q.shape[1] // k_cache.shape[1]
    if out is None:
        out = q.new_empty((*q.shape[:2], v_cache.shape[2]))
    for b in range(len(kv_lens)):
        start, end, length = int(query_start[b]), int(query_start[b + 1]), int(kv_lens[b])
        slots = req_to_token[int(req_pool_indices[b]), :length].long()
        keys = k_cache[slots].double().repeat_interleave(group, dim=1)
        values = v_cache[slots].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), keys) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        position = length - (end - start) + torch.arange(end - start)[:, None]
        key = torch.arange(length)[None, :]
        hidden = key > position
        if window >= 0:
            hidden |= key < position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).float()
    return out


def _shape(name: str, tensor: torch.Tensor, dims: int, dtype: torch.dtype | None = None) -> tuple[int, ...]:
    """The tensor's shape, after checking what the kernel cannot do without."""
    if tensor.dim() != dims:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, not {dims}")
    if dtype is None:
        if tensor.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} is {tensor.dtype}, not int32 or int64")
    elif tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
    elif tensor.stride(-1) != 1 and tensor.size(-1) > 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1")
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}, not on the CPU")
    return tuple(tensor.shape)


def _int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64).contiguous()
