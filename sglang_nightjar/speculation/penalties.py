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
        counting = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 or params.repetition_penalty != 1.0
        shortest = params.min_new_tokens - len(req.output_ids)
        if not counting and shortest <= 0:
            continue
        counts = _counts(req.output_ids, rows.shape[-1]) if counting else None
        for j, row in enumerate(rows):
            if counts is not None:
                if j > 0:
                    counts[chain[j]] += 1
                _penalize_counts(row, counts, params)
            if j < shortest:
                row[_stop_tokens(req)] = float("-inf")


def _counts(tokens: list[int], vocab_size: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab_size).to(torch.float32)


def _penalize_counts(row: torch.Tensor, counts: torch.Tensor, params: Any) -> None:
    seen = counts > 0
    row.sub_(counts * params.frequency_penalty)
    row.sub_(seen * params.presence_penalty)
    if params.repetition_penalty != 1.0:
        scaled = torch.where(row < 0, row * params.repetition_penalty, row / params.repetition_penalty)
        row.copy_(torch.where(seen, scaled, row))


def _stop_tokens(req: Any) -> list[int]:
    """Every token that may end the request (upstream seam: `BatchedMinNewTokensPenalizer`)."""
    tokenizer = req.tokenizer
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if tokenizer is not None:
        stops |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        stops.add(tokenizer.eos_token_id)
    return sorted(token for token in stops if token is not None)
