"""RMSNorm and rotary embedding of float32 rows, one call each, on the CPU.

In plain torch each is six to fifteen operations; for the few rows of a decode step what they
cost is not arithmetic but the calls. A row's result does not depend on the other rows.
"""

from __future__ import annotations

import math

import torch
from numba import float32, njit


@njit(cache=True, fastmath=True, nogil=True)
def _rms_norm(x, weight, epsilon, out):
    columns = x.shape[1]
    for i in range(x.shape[0]):
        row = x[i]
        total = float32(0)
        for k in range(columns):
            total += row[k] * row[k]
        scale = float32(1.0 / math.sqrt(total / columns + epsilon))
        for k in range(columns):
            out[i, k] = row[k] * scale * weight[k]


@njit(cache=True, fastmath=True, nogil=True)
def _add_rms_norm(x, residual, weight, epsilon, out, total_out):
    columns = x.shape[1]
    for i in range(x.shape[0]):
        total = float32(0)
        for k in range(columns):
            value = x[i, k] + residual[i, k]
            total_out[i, k] = value
            total += value * value
        scale = float32(1.0 / math.sqrt(total / columns + epsilon))
        for k in range(columns):
            out[i, k] = total_out[i, k] * scale * weight[k]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * weight by row; with `residual`, of x + residual, and that sum as well.

    Args:
        x, residual: float32 [N, K].
        weight: float32 [K].
    Returns:
        float32 [N, K], or two of them. The arguments keep their values.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    if residual is None:
        _rms_norm(x.numpy(), weight.numpy(), epsilon, out.numpy())
        return out
    total = torch.empty_like(x)
    _add_rms_norm(x.numpy(), residual.contiguous().numpy(), weight.numpy(), epsilon, out.numpy(), total.numpy())
    return out, total


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch and double precision."""
    total = x.double() if residual is None else x.double() + residual.double()
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon) * weight.double()
    return out.float() if residual is None else (out.float(), total.float())


@njit(cache=True, nogil=True)
def _rotate(x, positions, cos_sin, head_size, neox, out):
    """Rotates every head of every row; what lies beyond the rotated part is copied."""
    half = cos_sin.shape[1] // 2
    for i in range(x.shape[0]):
        angles = cos_sin[positions[i]]
        for start in range(0, x.shape[1], head_size):
            for k in range(half):
                first = start + k if neox else start + 2 * k
                second = first + half if neox else first + 1
                a, b = x[i, first], x[i, second]
                cos, sin = angles[k], angles[half + k]
                out[i, first] = a * cos - b * sin
                out[i, second] = b * cos + a * sin
            for k in range(start + 2 * half, start + head_size):
                out[i, k] = x[i, k]


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, head_size: int, neox: bool) -> torch.Tensor:
    """Rotary embedding.

    Args:
        x: float32 [N, heads * head_size], rows may be strided.
        positions: int64 [N].
        cos_sin: float32 [positions, rotary_dim]: cosines, then sines, of half the rotated dimensions each.
        neox: pairs are (k, k + half), else (2 k, 2 k + 1).
    Returns:
        float32 [N, heads * head_size], contiguous.
    """
    out = torch.empty(x.shape, dtype=torch.float32)
    _rotate(x.numpy(), positions.numpy(), cos_sin.numpy(), head_size, neox, out.numpy())
    return out


def rotate_reference(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, head_size: int, neox: bool
) -> torch.Tensor:
    """The same in plain torch and double precision."""
    rotary = cos_sin.shape[1]
    heads = x.double().unflatten(-1, (-1, head_size))
    cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, dim=-1)
    part, rest = heads[..., :rotary], heads[..., rotary:]
    if neox:
        a, b = part.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = part[..., ::2], part[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1).flatten(-2).float()
