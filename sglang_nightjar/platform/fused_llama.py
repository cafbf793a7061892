"""A Llama with integer weights, forward in one compiled call per layer, on the CPU.

Takes the loaded SGLang model apart once and never calls its modules. It covers what the demo's
draft is: `LlamaForCausalLM`, every linear and the embedding weight-only quantized by this platform,
one rank, full attention, plain rotary embedding. Any other model runs through SGLang's own modules.
"""

from typing import Any

import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.runtime_context import get_parallel

from sglang_nightjar.kernels.int8_linear import Int8Linear, QuantizedWeight
from sglang_nightjar.kernels.llama_layer import LayerShape, LayerWeights, llama_layer
from sglang_nightjar.kernels.row_ops import rms_norm
from sglang_nightjar.platform.quantization import WeightOnlyEmbeddingMethod, WeightOnlyLinearMethod


class FusedLlama:
    """Computes logits and writes K and V into the model runner's own pool."""

    def __init__(self, runner: Any) -> None:
        """`runner`: SGLang's `ModelRunner`, for which `why_not` has found nothing."""
        model = runner.model.model
        self._embedding = model.embed_tokens
        self._norm = model.norm
        self._head: Int8Linear = runner.model.lm_head.int8
        self._pool = runner.token_to_kv_pool
        self._table = runner.req_to_token_pool.req_to_token
        first = model.layers[0].self_attn
        self._cos_sin = first.rotary_emb.cos_sin_cache
        self._shape = LayerShape(
            first.num_heads,
            first.num_kv_heads,
            first.head_dim,
            first.rotary_emb.is_neox_style,
            model.norm.variance_epsilon,
            first.scaling,
        )
        self._layers = [
            (
                layer.self_attn.attn.layer_id,
                LayerWeights(
                    layer.input_layernorm.weight.data,
                    layer.post_attention_layernorm.weight.data,
                    *(
                        QuantizedWeight(linear.q, linear.scale)
                        for linear in (
                            layer.self_attn.qkv_proj,
                            layer.self_attn.o_proj,
                            layer.mlp.gate_up_proj,
                            layer.mlp.down_proj,
                        )
                    ),
                ),
            )
            for layer in model.layers
        ]

    @torch.inference_mode()
    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        req_pool_indices: torch.Tensor,
        query_start: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> torch.Tensor:
        """Logits after each request's last row.

        Args:
            input_ids, positions, slots: int64 [N], of each row; rows are in request order.
            req_pool_indices: int64 [B]. query_start: int64 [B + 1], the rows of each request.
            kv_lens: int64 [B], keys the last row of each request sees.
        Returns:
            float32 [B, V].
        """
        x = self._embedding.quant_method.embedding(self._embedding, input_ids).contiguous()
        for layer_id, weights in self._layers:
            llama_layer(
                x,
                weights,
                self._shape,
                positions=positions,
                cos_sin=self._cos_sin,
                slots=slots,
                k_cache=self._pool.get_key_buffer(layer_id),
                v_cache=self._pool.get_value_buffer(layer_id),
                req_to_token=self._table,
                req_pool_indices=req_pool_indices,
                query_start=query_start,
                kv_lens=kv_lens,
            )
        last = rms_norm(x[query_start[1:] - 1], self._norm.weight.data, self._norm.variance_epsilon)
        assert isinstance(last, torch.Tensor)
        return self._head(last)


def why_not(runner: Any) -> str | None:
    """Why `FusedLlama` cannot run this model, or None."""
    model = runner.model
    if type(model) is not LlamaForCausalLM:
        return f"it is a {type(model).__name__}"
    if get_parallel().tp_size != 1:
        return f"it is shared by {get_parallel().tp_size} ranks"
    if not isinstance(model.model.embed_tokens.quant_method, WeightOnlyEmbeddingMethod) or not hasattr(
        model.lm_head, "int8"
    ):
        return "its embedding or head is not weight-only quantized"
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            if not isinstance(linear.quant_method, WeightOnlyLinearMethod):
                return "a linear is not weight-only quantized"
            if linear.bias is not None:
                return "a linear has a bias"
        if (
            type(attention.rotary_emb) is not RotaryEmbedding
            or attention.rotary_emb.cos_sin_cache.dtype != torch.float32
        ):
            return "its rotary embedding is not the plain one"
        if attention.rotary_emb.rotary_dim != attention.head_dim or attention.head_dim % 8:
            return "its heads are not rotated whole, or not a multiple of 8 wide"
        window = attention.attn.sliding_window_size
        if (window is not None and window >= 0) or attention.attn.logit_cap:
            return "its attention has a window or capped scores"
    return None
