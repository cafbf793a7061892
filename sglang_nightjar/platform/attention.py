"""SGLang attention backend over the paged CPU kernel.

One rule covers every forward mode: a request contributes `n` consecutive query rows, and
its last row sees `kv_len` keys. Decode has n = 1; prefill has the uncached rest of the
prompt; verification of a chain has gamma + 1; a draft's first step has as many rows as
the draft lags behind, its later steps one.
"""

from typing import Any

import msgspec
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_nightjar.errors import UserError
from sglang_nightjar.kernels.paged_attention import paged_attention
from sglang_nightjar.platform.names import ATTENTION_BACKEND


class _BatchLayout(msgspec.Struct, frozen=True):
    """What one forward reads. `query_start`: int64 [B + 1]; `kv_lens`: int64 [B], keys the last row sees."""

    query_start: torch.Tensor
    kv_lens: torch.Tensor


class PagedCpuAttentionBackend(AttentionBackend):
    """Causal multi-head and grouped-query attention on float32 CPU tensors (upstream seam: attention registry)."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = model_runner.model_config.context_len
        self.layout: _BatchLayout | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Derives the layout of this forward from its mode; called once before the layers run."""
        mode = forward_batch.forward_mode
        batch_size = forward_batch.batch_size
        if mode.is_idle():
            self.layout = None
            return
        if mode.is_decode():
            query_start = torch.arange(batch_size + 1, dtype=torch.int64)
            kv_lens = forward_batch.seq_lens
        elif mode.is_target_verify():
            width = forward_batch.spec_info.draft_token_num
            query_start = torch.arange(0, (batch_size + 1) * width, width, dtype=torch.int64)
            kv_lens = forward_batch.seq_lens + width
        else:
            query_start = torch.zeros(batch_size + 1, dtype=torch.int64)
            torch.cumsum(forward_batch.extend_seq_lens, 0, out=query_start[1:])
            kv_lens = forward_batch.seq_lens
        self.layout = _BatchLayout(query_start, kv_lens)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise UserError(
                f"{ATTENTION_BACKEND} serves causal decoders only; this model has {layer.attn_type} attention"
            )
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        assert self.layout is not None, "init_forward_metadata must run before the layers"
        window = layer.sliding_window_size
        out = paged_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token,
            forward_batch.req_pool_indices,
            self.layout.query_start,
            self.layout.kv_lens,
            layer.scaling,
            window=-1 if window is None else window,
            logit_cap=layer.logit_cap or 0.0,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing to refill: a chain's layout does not depend on the drafted tokens."""
