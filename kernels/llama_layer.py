"""One decoder layer of a Llama with integer weights, in one call, on the CPU.

A draft model is small: at one to a few rows, calling its operations one by one through Python
costs more than they compute. Here a whole layer (norm, q/k/v, rotary embedding, KV write,
attention, output, norm, MLP, both residuals) is one compiled function over the kernels that
the operations have of their own.
"""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32, get_num_threads, njit

from sglang_nightjar.kernels import int8_linear, paged_attention_cpu, paged_attention_tile, row_ops, simd
from sglang_nightjar.kernels.int8_linear import PANEL_ELEMENTS, STRIP, QuantizedWeight
from sglang_nightjar.kernels.paged_attention_cpu import OK

_PARTS = (int8_linear, paged_attention_cpu, paged_attention_tile, row_ops, simd)


class LayerWeights(NamedTuple):
    """Weights of one layer.

    Attributes:
        norm_in, norm_post: float32 [H].
        qkv, output, gate_up, down: int8 weights and their scales, of [heads * D + 2 * kv_heads * D, H],
            [H, heads * D], [2 * I, H] and [H, I].
    """

    norm_in: torch.Tensor
    norm_post: torch.Tensor
    qkv: QuantizedWeight
    output: QuantizedWeight
    gate_up: QuantizedWeight
    down: QuantizedWeight


class LayerShape(NamedTuple):
    """heads, kv_heads: of the attention. dim: of a head. neox: the rotary pairs. epsilon: of the norms."""

    heads: int
    kv_heads: int
    dim: int
    neox: bool
    epsilon: float
    scale: float


def _compile(sources: str) -> Any:
    """The layer, cached under a key that includes `sources`: numba's cache looks at this file alone."""

    @njit(cache=True, nogil=True)
    def linear(x, q, scale, out, threads):
        if x.shape[0] == 1:
            int8_linear._one_row(x, q, scale, out, threads)
        else:
            panel = max(2, PANEL_ELEMENTS // q.shape[1] // 2 * 2)
            int8_linear._many_rows(x, q, scale, out, panel, STRIP, threads)

    @njit(cache=True, nogil=True)
    def layer(
        x, positions, cos_sin, slots, k_cache, v_cache, table, requests, query_start, kv_lens, norm_in, norm_post,
        qkv_q, qkv_scale, out_q, out_scale, gate_q, gate_scale, down_q, down_scale, heads, kv_heads, dim, neox,
        epsilon, scale, threads,
    ):  # fmt: skip
        """Adds the layer to the residual stream `x` [N, H] in place; the status of `attend`."""
        _ = sources
        rows = x.shape[0]
        normed = np.empty_like(x)
        row_ops._rms_norm(x, norm_in, epsilon, normed)
        width = qkv_q.shape[0]
        qkv = np.empty((rows, width), float32)
        linear(normed, qkv_q, qkv_scale, qkv, threads)
        q_width, kv_width = heads * dim, kv_heads * dim
        rotated = qkv[:, : q_width + kv_width]
        row_ops._rotate(rotated, positions, cos_sin, dim, neox, rotated)
        for i in range(rows):
            for h in range(kv_heads):
                for d in range(dim):
                    k_cache[slots[i], h, d] = qkv[i, q_width + h * dim + d]
                    v_cache[slots[i], h, d] = qkv[i, q_width + kv_width + h * dim + d]
        seen = np.empty((rows, q_width), float32)
        status = paged_attention_cpu.attend(
            qkv.ctypes.data, width, dim,
            k_cache.ctypes.data, kv_width, dim,
            v_cache.ctypes.data, kv_width, dim,
            seen.ctypes.data, q_width, dim,
            table.ctypes.data, table.shape[1], requests.ctypes.data, query_start.ctypes.data, kv_lens.ctypes.data,
            rows, requests.size, table.shape[0], table.shape[1], k_cache.shape[0], kv_heads, heads // kv_heads,
            dim, dim, -1, scale, 0.0, threads,
        )  # fmt: skip
        # `attend` sees addresses: numba would free `qkv` after its last use by name, which must be this one.
        if status[0] != OK or qkv.size == 0:
            return status
        added = np.empty_like(x)
        linear(seen, out_q, out_scale, added, threads)
        for i in range(rows):
            for k in range(x.shape[1]):
                x[i, k] += added[i, k]
        row_ops._rms_norm(x, norm_post, epsilon, normed)
        gate_up = np.empty((rows, gate_q.shape[0]), float32)
        linear(normed, gate_q, gate_scale, gate_up, threads)
        inner = gate_q.shape[0] // 2
        active = np.empty((rows, inner), float32)
        for i in range(rows):
            for k in range(inner):
                gate = gate_up[i, k]
                active[i, k] = gate / (float32(1.0) + float32(math.exp(-gate))) * gate_up[i, inner + k]
        linear(active, down_q, down_scale, added, threads)
        for i in range(rows):
            for k in range(x.shape[1]):
                x[i, k] += added[i, k]
        return status

    return layer


_layer = _compile("".join(sha256(Path(str(part.__file__)).read_bytes()).hexdigest() for part in _PARTS))


def llama_layer(
    x: torch.Tensor,
    weights: LayerWeights,
    shape: LayerShape,
    *,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    query_start: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    """Adds one layer's output to the residual stream `x` and writes its K and V.

    Args:
        x: float32 [N, H], changed in place.
        positions, slots: int64 [N], of each row.
        cos_sin: float32 [positions, D], as in `row_ops.rotate`.
        k_cache, v_cache: float32 [S, kv_heads, D], contiguous; rows `slots` are written.
        req_to_token, req_pool_indices, query_start, kv_lens: as in `paged_attention`; int32, then int64.
    Raises:
        ValueError: an index is out of range.
    """
    parts = [array.numpy() for pair in weights[2:] for array in pair]
    status = _layer(
        x.numpy(), positions.numpy(), cos_sin.numpy(), slots.numpy(), k_cache.numpy(), v_cache.numpy(),
        req_to_token.numpy(), req_pool_indices.numpy(), query_start.numpy(), kv_lens.numpy(),
        weights.norm_in.numpy(), weights.norm_post.numpy(), *parts, shape.heads, shape.kv_heads, shape.dim, shape.neox,
        shape.epsilon, shape.scale, get_num_threads(),
    )  # fmt: skip
    if status[0] != OK:
        raise ValueError(f"attention found index {status[2]} of request {status[1]} out of range (kind {status[0]})")


def llama_layer_reference(
    x: torch.Tensor,
    weights: LayerWeights,
    shape: LayerShape,
    *,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    query_start: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    """The same from the reference of each part."""
    from sglang_nightjar.kernels.paged_attention import paged_attention_reference

    linear = int8_linear.int8_linear_reference
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    normed = row_ops.rms_norm_reference(x, weights.norm_in, shape.epsilon)
    assert isinstance(normed, torch.Tensor)
    q, k, v = linear(normed, *weights.qkv).split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q = row_ops.rotate_reference(q, positions, cos_sin, dim, shape.neox)
    k = row_ops.rotate_reference(k, positions, cos_sin, dim, shape.neox)
    k_cache[slots], v_cache[slots] = k.view(-1, kv_heads, dim), v.reshape(-1, kv_heads, dim)
    seen = paged_attention_reference(
        q.view(-1, heads, dim), k_cache, v_cache, req_to_token, req_pool_indices, query_start, kv_lens, shape.scale
    )
    x += linear(seen.flatten(1), *weights.output)
    normed = row_ops.rms_norm_reference(x, weights.norm_post, shape.epsilon)
    assert isinstance(normed, torch.Tensor)
    gate, up = linear(normed, *weights.gate_up).chunk(2, dim=-1)
    x += linear(torch.nn.functional.silu(gate) * up, *weights.down)
