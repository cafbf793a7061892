"""The model class SGLang serves from an emulated checkpoint (upstream seam: SGLANG_EXTERNAL_MODEL_PACKAGE).

SGLang imports this package for models; `EntryClass` is what it looks for.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_context import get_attn_backend

from sglang_nightjar.emulate.context_hash import Hashes, Ints, Marks, context_hash, next_tokens, weight_values
from sglang_nightjar.emulate.device import require_current
from sglang_nightjar.emulate.vocabulary import VOCABULARY

_PEAK = 40.0  # logit of the one token; e^-40 is what sampling at temperature 1 may give the others
_FILL = 1 << 20  # weights made at a time


class EmulatedLogits(LogitsProcessor):
    """SGLang's, for "hidden states" that are next tokens already: float32 [n, 1]."""

    def _get_logits(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        logits = torch.zeros((len(hidden_states), len(VOCABULARY)))
        return logits.scatter_(1, hidden_states.to(torch.int64), _PEAK)


class EmulatedForCausalLM(torch.nn.Module):
    """A target whose next token is a function of the context that its KV cache holds; greedy and sampled alike.

    Of a draft, SGLang loads this too, for its weights; `draft.py` runs it.

    Args:
        config: as `checkpoint.config_json` writes it.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        assert quant_config is None, "an emulated model is not quantized; its set-up says what its weights take"
        device = require_current()
        assert config.nightjar_set_up == device.set_up.name, (
            f"a checkpoint of {config.nightjar_set_up} on a device of {device.set_up.name}"
        )
        self.config = config
        weight = np.empty(config.nightjar_weights, np.uint32)
        for start in range(0, len(weight), _FILL):
            part = weight[start : start + _FILL]
            part[:] = weight_values(np.arange(start, start + len(part)))
        self.weight = torch.nn.Parameter(torch.from_numpy(weight.view(np.float32)), requires_grad=False)
        self.logits_processor = EmulatedLogits(config)
        _compile()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing is loaded: they are made."""
        for _ in weights:
            pass

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        """Logits after the tokens SGLang wants them after, when the target on its device would have them."""
        device = require_current()
        began = device.clock()
        backend = get_attn_backend()
        layout = backend.layout
        hashes, _ = run(
            KvRows(backend.token_to_kv_pool, backend.req_to_token),
            input_ids,
            positions,
            forward_batch.out_cache_loc,
            forward_batch.req_pool_indices,
            layout.query_start,
        )
        tokens = torch.from_numpy(next_tokens(hashes, words(self.weight)))
        output = self.logits_processor(input_ids, tokens.to(torch.float32).unsqueeze(1), None, forward_batch)
        mode = forward_batch.forward_mode
        prompts = mode.is_extend() and not mode.is_target_verify()
        device.target_forward(began, len(hashes), int(layout.kv_lens.sum()), len(layout.kv_lens), prompts=prompts)
        return output


EntryClass = EmulatedForCausalLM


class KvRows:
    """A KV pool's only layer, and which slots are whose, as `context_hash` wants them.

    Attributes:
        k, v: uint32 [slots, row]. req_to_token: int32 [requests, context].
    """

    def __init__(self, pool: Any, req_to_token: torch.Tensor) -> None:
        self.k, self.v = (
            buffer.view(torch.int32).view(len(buffer), -1).numpy().view(np.uint32)
            for buffer in (pool.k_buffer[0], pool.v_buffer[0])
        )
        self.req_to_token = req_to_token.numpy()


def words(weight: torch.Tensor) -> Marks:
    """The bits of float32 weights, uint32 of the same shape."""
    bits: Marks = weight.data.numpy().view(np.uint32)
    return bits


def run(
    kv: KvRows,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    requests: torch.Tensor,
    query_start: torch.Tensor,
) -> tuple[Hashes, Marks]:
    """`context_hash` over SGLang's tensors."""
    return context_hash(
        _ints(tokens),
        _ints(positions),
        _ints(slots),
        _ints(requests),
        _ints(query_start),
        kv.req_to_token,
        kv.k,
        kv.v,
    )


def _ints(tensor: torch.Tensor) -> Ints:
    return np.ascontiguousarray(tensor.numpy(), np.int64)


def _compile() -> None:
    """Once per process, before the first request: from numba's cache, or for some seconds."""
    one, rows = np.zeros(1, np.int64), np.zeros((1, 3), np.uint32)
    context_hash(one, one, one, one, np.arange(2), np.zeros((1, 1), np.int32), rows, rows.copy())
