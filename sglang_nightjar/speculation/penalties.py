"""Penalties along a drafted chain: each position counts the drafts before it as output.

SGLang's own speculation adds one set of penalties to a whole chain and counts one token a
round; that is a different distribution. Here row j of a request sees its committed output
plus its first j drafts, which is what a plain decode of that token would see.
"""

from typing import Any

import torch


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
            output = torch.tensor(req.output_ids, dtype=torch.int64, device=logits.device)
            for j, row in enumerate(rows):
                _penalize_output(row, torch.cat([output, chain[1 : j + 1]]), params)
        missing = params.min_new_tokens - len(req.output_ids)
        if missing > 0:
            rows[:missing, _stop_tokens(req)] = float("-inf")


def _penalize_output(row: torch.Tensor, output: torch.Tensor, params: Any) -> None:
    """Penalizes the tokens of `output` in `row`, additive penalties first, as upstream does."""
    seen, counts = output.unique(return_counts=True)
    values = row[seen] - (counts * params.frequency_penalty + params.presence_penalty)
    scale = params.repetition_penalty
    row[seen] = torch.where(values < 0, values * scale, values / scale)


def _stop_tokens(req: Any) -> list[int]:
    """Every token that may end the request (upstream seam: `BatchedMinNewTokensPenalizer`)."""
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stops |= set(req.tokenizer.additional_stop_token_ids or ())
        stops.add(req.tokenizer.eos_token_id)
    return sorted(stops - {None})
