"""The draft's forward on the emulated device, in the form `ChainDraftWorker` runs a fused draft."""

from typing import Any

import numpy as np
import torch

from sglang_nightjar.emulate.context_hash import next_tokens
from sglang_nightjar.emulate.device import require_current
from sglang_nightjar.emulate.model import EmulatedForCausalLM, KvRows, run, words
from sglang_nightjar.emulate.vocabulary import VOCABULARY


class EmulatedDraft:
    """Computes what the target would answer from the draft's own KV, and answers that as often as it is to agree."""

    def __init__(self, runner: Any) -> None:
        """`runner`: SGLang's `ModelRunner` of an `EmulatedForCausalLM`, its pools made."""
        self._model = runner.model
        self._kv = KvRows(runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token)
        self._device = require_current()

    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        req_pool_indices: torch.Tensor,
        query_start: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> torch.Tensor:
        """Logits after each request's last row, float32 [B, V]; arguments as `FusedLlama`'s."""
        device = self._device
        began = device.clock()
        hashes, marks = run(self._kv, input_ids, positions, slots, req_pool_indices, query_start)
        last = query_start[1:].numpy() - 1
        right = next_tokens(hashes[last], words(self._model.weight))
        tokens, stated = device.agreement.answers(hashes[last], marks[last], right, device.now_s())
        logits = torch.zeros((len(tokens), len(VOCABULARY)))
        # So that the softmax gives this token the probability stated; above all others even where that is low.
        peaks = np.maximum(np.log(stated / (1.0 - stated)) + np.log(len(VOCABULARY) - 1), 1e-3)
        logits[torch.arange(len(tokens)), torch.from_numpy(tokens)] = torch.from_numpy(peaks.astype(np.float32))
        device.draft_forward(began, len(hashes), int(kv_lens.sum()), len(last))
        return logits


def emulated_draft(runner: Any) -> EmulatedDraft | None:
    """The draft of `runner`, where it is an emulated one."""
    return EmulatedDraft(runner) if isinstance(runner.model, EmulatedForCausalLM) else None
