# TEMPORARY STAND-IN by the lead, to boot a server; helper 2: overwrite this file with yours.
from typing import NamedTuple

import torch


class QuantizedWeight(NamedTuple):
    q: torch.Tensor
    scale: torch.Tensor


def quantize_weight(weight, bits, group_size=0):
    g = weight.shape[1] // group_size if group_size else 1
    w = weight.unflatten(1, (g, -1))
    top = 2 ** (bits - 1) - 1
    scale = w.abs().amax(-1) / top
    q = (w / scale.unsqueeze(-1).clamp(min=1e-12)).round().clamp(-top, top).to(torch.int8)
    return QuantizedWeight(q.flatten(1), scale)


def int8_linear(x, q, scale, bias=None):
    w = (q.float().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)
    return torch.nn.functional.linear(x, w, bias)
