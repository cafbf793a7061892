"""Penalties along a drafted chain: each position counts the drafts before it as output.

SGLang's own speculation adds one set of penalties to a whole chain and counts one token a
round; that is a different distribution. Here row j of a request sees its committed output
plus its first j drafts, which is what a plain decode of that token would see.
"""

from typing import Any

import torch
from torch.nn import functional


def apply_penalties(logits: torch.Tensor, reqs: list[Any], candidates: torch.Tensor) -> None:
    """Applies frequency, presence, repetition and min-new-tokens penalties in place.

    Args:
        logits: float32 [B, n, V].
        reqs: SGLang requests; `output_ids` ends with the bonus token.
        candidates: int64 [B, n]: bonus token, then drafts.
    """
    for rows, req, chain in zip(logits, reqs, candidates, strict=True):
        params = req.sampling_params
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 or params.repetition_penalty != 1.0:
            _penalize_output(rows, torch.tensor(req.output_ids, device=rows.device), chain[1:], params)
        missing = params.min_new_tokens - len(req.output_ids)
        if missing > 0:
            rows[:missing, _stop_tokens(req)] = float("-inf")


def _penalize_output(rows: torch.Tensor, output: torch.Tensor, drafts: torch.Tensor, params: Any) -> None:
    """Penalizes in row j what `output` and the first j of the n - 1 `drafts` contain: additive penalties first."""
    tokens, index, total = torch.cat([output, drafts]).unique(return_inverse=True, return_counts=True)
    drafted = functional.one_hot(index[len(output) :], len(tokens))
    counts = total - drafted.sum(0) + functional.pad(drafted.cumsum(0), (0, 0, 1, 0))  # [n, distinct tokens]

    plain = rows[:, tokens]
    lowered = plain - (counts * params.frequency_penalty + params.presence_penalty)
    scale = params.repetition_penalty
    scaled = torch.where(lowered < 0, lowered * scale, lowered / scale)
    rows[:, tokens] = torch.where(counts > 0, scaled, plain)


def _stop_tokens(req: Any) -> list[int]:
    """Every token that may end the request (upstream seam: `BatchedMinNewTokensPenalizer`)."""
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stops |= set(req.tokenizer.additional_stop_token_ids or ())
        stops.add(req.tokenizer.eos_token_id)
    return sorted(stops - {None})
