"""Penalties along a drafted chain: each position counts the drafts before it as output.

SGLang's own speculation adds one set of penalties to a whole chain and counts one token a
round; that is a different distribution. Here row j of a request sees its committed output
plus its first j drafts, which is what a plain decode of that token would see.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from sglang_nightjar.speculation.late_tokens import NONE_LATE, output_tokens


def apply_penalties(
    logits: torch.Tensor, reqs: list[Any], candidates: torch.Tensor, late: Mapping[str, Sequence[int]] = NONE_LATE
) -> None:
    """Applies frequency, presence, repetition and min-new-tokens penalties in place.

    Args:
        logits: float32 [B, n, V].
        reqs: SGLang requests.
        candidates: int64 [B, n]: bonus token, then drafts.
        late: output tokens not in `output_ids` yet, by request id; the bonus token is the last of them, or of those.
    """
    assert len(logits) == len(candidates) == len(reqs), f"{len(logits)} rows for {len(reqs)} requests"
    for index, req in enumerate(reqs):  # most ask for nothing, and a view of their rows would be most of the cost
        params = req.sampling_params
        if _penalizes_output(params):
            output = torch.tensor(output_tokens(req, late), device=logits.device)
            _penalize_output(logits[index], output, candidates[index, 1:], params)
        if params.min_new_tokens > 0:
            missing = params.min_new_tokens - len(req.output_ids) - len(late.get(req.rid, ()))
            logits[index][: max(missing, 0), _stop_tokens(req)] = float("-inf")


def asks_for_penalties(req: Any) -> bool:
    """Whether `apply_penalties` may change anything for an SGLang request."""
    return _penalizes_output(req.sampling_params) or req.sampling_params.min_new_tokens > 0


def _penalizes_output(params: Any) -> bool:
    additive = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    return additive or params.repetition_penalty != 1.0


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
