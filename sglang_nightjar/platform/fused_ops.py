"""The CPU platform's own form of SGLang's fused operations (upstream seam: `BaseFusedOp.register_oot_forward`).

Each takes the case a decoder on this platform meets, float32 and no options, and hands every
other one to SGLang's plain torch form.
"""

from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sglang_nightjar.kernels.row_ops import rms_norm, rotate

DISPATCH_KEY = "nightjar_cpu"


def register_fused_ops() -> None:
    """Makes SGLang dispatch to these wherever the platform's dispatch key is `DISPATCH_KEY`."""
    BaseFusedOp.register_oot_forward(RMSNorm, _rms_norm, DISPATCH_KEY)
    BaseFusedOp.register_oot_forward(RotaryEmbedding, _rotary, DISPATCH_KEY)


def _rms_norm(
    op: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    plain = (
        x.dtype == torch.float32
        and x.dim() == 2
        and x.shape[-1] == op.hidden_size
        and post_residual_addition is None
        and op.variance_size_override is None
        and not op.cast_x_before_out_mul
        and op.weight.dtype == torch.float32
    )
    if not plain:
        return op.forward_native(x, residual, post_residual_addition)
    return rms_norm(x, op.weight.data, op.variance_epsilon, residual)


def _rotary(
    op: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    plain = (
        query.dtype == torch.float32
        and query.dim() == 2
        and key.dim() == 2
        and positions.dim() == 1
        and offsets is None
        and fused_set_kv_buffer_arg is None
        and not hasattr(op, "sin_cos_cache")
        and op.cos_sin_cache.dtype == torch.float32
    )
    if not plain:
        return op.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    positions = positions.to(torch.int64)
    return (
        rotate(query, positions, op.cos_sin_cache, op.head_size, op.is_neox_style),
        rotate(key, positions, op.cos_sin_cache, op.head_size, op.is_neox_style),
    )
