"""Linear layers with integer weights and float32 activations, on the CPU.

Only the weight is quantized: symmetrically, to `bits` bits held in int8, with one float32
scale per output channel or per group of input channels. It is meant for a draft model, where
an error costs acceptance but never correctness: a decode step reads every weight once, so a
quarter of the bytes is close to a quarter of the time, and fewer bits dial the draft's
agreement with its target down.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import float32, get_num_threads, njit, prange

MIN_BITS, MAX_BITS = 3, 8

# A scale that clips a few large weights resolves the many small ones better. That pays when
# the steps are coarse.
MAX_BITS_CLIPPED = 6
CLIP_RATIOS = tuple(1.0 - 0.04 * i for i in range(16))  # 1.0 to 0.4 of the largest weight

QUANTIZE_ELEMENTS = 1 << 18  # weights searched at once: their temporaries stay in cache
PANEL_ELEMENTS = 1 << 16  # elements of x that stay in the L2 cache while the weights pass by
STRIP = 1024  # input channels of four weight rows and two rows of x that stay in the L1 cache


class QuantizedWeight(NamedTuple):
    """A weight [N, K] as integers times scales.

    q: int8 [N, K].
    scale: float32 [N, G]; the scale of q[n, k] is scale[n, k // (K // G)].
    """

    q: torch.Tensor
    scale: torch.Tensor


def quantize_weight(weight: torch.Tensor, bits: int, group_size: int = 0) -> QuantizedWeight:
    """Round a weight to integers of `bits` bits, -(2**(bits-1) - 1) to 2**(bits-1) - 1.

    Up to `MAX_BITS_CLIPPED` bits, each group's scale is the one of `CLIP_RATIOS` with the
    least squared error; with more bits, the largest weight of the group fits exactly.

    Args:
        weight: float32 [N, K], finite.
        bits: 3 to 8.
        group_size: input channels that share a scale; must divide K. 0 means all K.
    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    if weight.dtype != torch.float32 or weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight must be a non-empty float32 matrix, not {weight.dtype} {list(weight.shape)}")
    if not torch.isfinite(weight).all():
        raise ValueError("weight must be finite, but holds NaN or infinity")
    if bits not in range(MIN_BITS, MAX_BITS + 1):
        raise ValueError(f"bits must be {MIN_BITS} to {MAX_BITS}, not {bits}")
    n, k = weight.shape
    group = group_size or k
    if group < 0 or k % group:
        raise ValueError(f"group_size must be 0 or a divisor of the {k} input channels, not {group_size}")

    top = 2 ** (bits - 1) - 1
    ratios = CLIP_RATIOS if bits <= MAX_BITS_CLIPPED else (1.0,)
    groups = weight.detach().reshape(-1, group)
    q = torch.empty(groups.shape, dtype=torch.int8)
    scale = torch.empty(groups.shape[0], 1, dtype=torch.float32)
    step = max(1, QUANTIZE_ELEMENTS // group)
    for i in range(0, groups.shape[0], step):
        q[i : i + step], scale[i : i + step] = _quantize_groups(groups[i : i + step], top, ratios)
    return QuantizedWeight(q.view(n, k), scale.view(n, k // group))


def _quantize_groups(w: torch.Tensor, top: int, ratios: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers [R, group] and scales [R, 1] of groups [R, group] with the least squared error."""
    exact = w.abs().amax(dim=1, keepdim=True) / top
    best_scale = torch.empty_like(exact)
    best_error = torch.full_like(exact, torch.inf)
    for ratio in ratios:
        scale = exact * ratio
        scale[scale == 0] = 1.0  # a group of zeros
        error = _round(w, scale, top).mul_(scale).sub_(w).square_().sum(dim=1, keepdim=True)
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    return _round(w, best_scale, top).to(torch.int8), best_scale


def _round(w: torch.Tensor, scale: torch.Tensor, top: int) -> torch.Tensor:
    return (w / scale).round_().clamp_(-top, top)


def dequantize(qw: QuantizedWeight) -> torch.Tensor:
    """The float32 weight [N, K] that `qw` stands for."""
    groups = qw.q.unflatten(1, (qw.scale.shape[1], -1))
    return (groups * qw.scale.unsqueeze(2)).flatten(1)


class Int8Linear:
    """`int8_linear` for one fixed weight, which is checked once: a decode step calls it 120 times.

    Args:
        q, scale: as in `QuantizedWeight`, contiguous.
    """

    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        _check_weight(q, scale)
        self.out_features, self.in_features = q.shape
        self._q, self._scale = q.numpy(), scale.numpy()
        self._panel = max(2, PANEL_ELEMENTS // self.in_features // 2 * 2)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [..., K] to float32 [..., N]."""
        _check_input(x, bias, self.out_features, self.in_features)
        flat = x.dim() == 2  # no views then: each costs as much as a small product
        rows = (x if flat else x.reshape(-1, self.in_features)).contiguous()
        out = torch.empty((rows.shape[0], self.out_features), dtype=torch.float32)
        if rows.shape[0] == 1:
            _one_row(rows.numpy(), self._q, self._scale, out.numpy(), get_num_threads())
        elif rows.shape[0] > 1:
            _many_rows(rows.numpy(), self._q, self._scale, out.numpy(), self._panel, STRIP, get_num_threads())
        if bias is not None:
            out += bias
        return out if flat else out.view(*x.shape[:-1], self.out_features)


def int8_linear(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x times the transpose of a quantized weight, plus the bias, in float32.

    The order of additions is one for a single row of x and another for two rows or more: the
    result of a row differs between the two by about 2e-7 of the largest outputs. From two rows
    on it does not depend on how many there are.

    Runs on `numba.get_num_threads()` threads. x and the weight are not copied unless x is
    not contiguous.

    Args:
        x: float32 [..., K], not requiring a gradient.
        q, scale: as in `QuantizedWeight`, contiguous.
        bias: float32 [N] or None.
    Returns:
        float32 [..., N].
    Raises:
        ValueError: a shape or dtype does not fit; the message names the argument.
    """
    return Int8Linear(q, scale)(x, bias)


def int8_linear_reference(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain torch and double precision."""
    weight = dequantize(QuantizedWeight(q, scale)).double()
    return torch.nn.functional.linear(x.double(), weight, None if bias is None else bias.double()).float()


def _check_weight(q: torch.Tensor, scale: torch.Tensor) -> None:
    if q.dtype != torch.int8 or q.dim() != 2 or q.shape[1] == 0 or not q.is_contiguous():
        raise ValueError(f"q must be a contiguous int8 matrix, not {q.dtype} {list(q.shape)}")
    n, k = q.shape
    if scale.dtype != torch.float32 or scale.dim() != 2 or scale.shape[0] != n or not scale.is_contiguous():
        raise ValueError(f"scale must be contiguous float32 [{n}, groups], not {scale.dtype} {list(scale.shape)}")
    if scale.shape[1] == 0 or k % scale.shape[1]:
        raise ValueError(f"scale must have a number of groups that divides {k}, not {scale.shape[1]}")


def _check_input(x: torch.Tensor, bias: torch.Tensor | None, n: int, k: int) -> None:
    if x.dtype != torch.float32 or x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x must be float32 [..., {k}], not {x.dtype} {list(x.shape)}")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (n,)):
        raise ValueError(f"bias must be float32 [{n}], not {bias.dtype} {list(bias.shape)}")


# fastmath lets LLVM sum a dot product in several lanes and registers. Every loop counts from 0
# to the length of a row: with another start LLVM cannot see that an index is not negative, and
# gathers single elements, ten times slower.


@njit(parallel=True, fastmath=True, cache=True)
def _one_row(x, q, scale, out, threads):
    """A single row needs each weight once, so it is converted in a register."""
    n = q.shape[0]
    group = q.shape[1] // scale.shape[1]
    row = x[0]
    for thread in prange(threads):
        for i in range(n * thread // threads, n * (thread + 1) // threads):
            weight = q[i]
            total = float32(0)
            for g in range(scale.shape[1]):
                start = g * group
                part = float32(0)
                for k in range(group):
                    part += float32(weight[start + k]) * row[start + k]
                total += part * scale[i, g]
            out[0, i] = total


@njit(parallel=True, fastmath=True, cache=True)
def _many_rows(x, q, scale, out, panel, strip, threads):
    """The weight's rows are shared out among the threads; x is taken `panel` rows at a time."""
    blocks = (q.shape[0] + 3) // 4
    for thread in prange(threads):
        first, last = blocks * thread // threads, blocks * (thread + 1) // threads
        for i in range(0, x.shape[0], panel):
            _panel(x[i : i + panel], q, scale, out[i : i + panel], first, last, strip)


@njit(fastmath=True, cache=True)
def _panel(x, q, scale, out, first_block, last_block, strip):
    """Convert four weight rows at a time and use them for all rows of x, two by two."""
    m, k = x.shape
    n = q.shape[0]
    w0, w1, w2, w3 = np.empty(k, float32), np.empty(k, float32), np.empty(k, float32), np.empty(k, float32)
    sums = np.empty((m + 1, 4), float32)  # one row more than x: the partner of an odd last row
    for block in range(first_block, last_block):
        n0 = 4 * block
        last = n - 1  # repeated where the last block has fewer than four rows
        _to_float(q[n0], scale[n0], w0)
        _to_float(q[min(n0 + 1, last)], scale[min(n0 + 1, last)], w1)
        _to_float(q[min(n0 + 2, last)], scale[min(n0 + 2, last)], w2)
        _to_float(q[min(n0 + 3, last)], scale[min(n0 + 3, last)], w3)
        sums[:] = 0
        for start in range(0, k, strip):
            stop = min(start + strip, k)
            v0, v1, v2, v3 = w0[start:stop], w1[start:stop], w2[start:stop], w3[start:stop]
            for pair in range((m + 1) // 2):
                i, j = 2 * pair, 2 * pair + 1
                _add_dots(v0, v1, v2, v3, x[i, start:stop], x[min(j, m - 1), start:stop], sums[i], sums[j])
        for i in range(m):
            for c in range(min(4, n - n0)):
                out[i, n0 + c] = sums[i, c]


@njit(fastmath=True, cache=True)
def _to_float(q, scale, out):
    """out[k] = q[k] times the scale of its group."""
    group = q.shape[0] // scale.shape[0]
    for g in range(scale.shape[0]):
        factor = scale[g]
        start = g * group
        for k in range(group):
            out[start + k] = float32(q[start + k]) * factor


@njit(fastmath=True, cache=True)
def _add_dots(w0, w1, w2, w3, xa, xb, sums_a, sums_b):
    """Add the eight dot products of four weight rows and two rows of x: eight sums in registers."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = float32(0)
    for k in range(xa.shape[0]):
        a, b = xa[k], xb[k]
        a0 += w0[k] * a
        a1 += w1[k] * a
        a2 += w2[k] * a
        a3 += w3[k] * a
        b0 += w0[k] * b
        b1 += w1[k] * b
        b2 += w2[k] * b
        b3 += w3[k] * b
    sums_a[0] += a0
    sums_a[1] += a1
    sums_a[2] += a2
    sums_a[3] += a3
    sums_b[0] += b0
    sums_b[1] += b1
    sums_b[2] += b2
    sums_b[3] += b3
