"""Lossless verification of a drafted chain by sampling, for greedy and random requests alike.

At each position of the chain a token is drawn from exactly the distribution the plain
server would draw it from (same penalties, bias, grammar mask, temperature, filters and
seed). Drafts are accepted while the draws agree with them; the first draw that does not
is itself the next token. A draft proposed with certainty is thereby accepted with the
target's own probability of it, which is what speculative sampling prescribes
(Leviathan et al. 2023, with a point-mass proposal), and a seeded request gets the very
tokens it would get without speculation.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_nightjar.speculation.late_tokens import NONE_LATE
from sglang_nightjar.speculation.penalties import apply_penalties

# What SGLang's sampler reads of a request; each is a tensor with one row per request, or None.
_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def sample_chain(
    *,
    sampler: Any,
    logits: torch.Tensor,
    candidates: torch.Tensor,
    seq_lens: torch.Tensor,
    reqs: list[Any],
    sampling_info: Any,
    grammar_mask: Any | None,
    penalized: bool,
    keep_logits: bool,
    late: Mapping[str, Sequence[int]] = NONE_LATE,
) -> torch.Tensor:
    """Draws a token at every position of every chain.

    Args:
        sampler: SGLang's `Sampler` of the target.
        logits: float32 [B * n, V], row b * n + j after `candidates[b, j]`. Adjusted in place by
            penalties, grammar and bias, as SGLang's own sampling does, so that logprobs taken
            from it afterwards are the plain server's.
        candidates: int64 [B, n]: bonus token, then drafts.
        seq_lens: int64 [B], position of the bonus token.
        reqs: SGLang requests, for penalties.
        sampling_info: the batch's `SamplingBatchInfo`.
        grammar_mask: mask over the B * n rows, or None.
        penalized: whether any of `reqs` asks for penalties.
        keep_logits: whether anybody reads `logits` afterwards; sampling at a temperature overwrites them.
        late: output tokens the scheduler has not appended yet (`late_tokens.py`), for penalties.
    Returns:
        int64 [B, n].
    """
    batch_size, width = candidates.shape
    if penalized:
        apply_penalties(logits.view(batch_size, width, -1), reqs, candidates, late)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if sampling_info.logit_bias is not None:
        logits.view(batch_size, width, -1).add_(sampling_info.logit_bias.unsqueeze(1))

    positions = seq_lens.to(torch.int64)
    if width > 1:
        positions = (positions.unsqueeze(1) + torch.arange(width, device=candidates.device)).flatten()
    tokens = sampler(
        _LogitsOnly(logits.clone() if keep_logits and not sampling_info.is_all_greedy else logits),
        _repeat_rows(sampling_info, width),
        False,
        [],
        [],
        positions,
    )
    return tokens.to(torch.int64).view(batch_size, width)


def accepted_drafts(tokens: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Drafts in agreement with the draws before the first disagreement, int64 [B]."""
    agrees = tokens[:, :-1] == candidates[:, 1:]
    return agrees.long().cumprod(1).sum(1)


def most_likely(probabilities: torch.Tensor, budget: int) -> torch.Tensor:
    """Drafts of each request among the `budget` with the largest cumulative probability, int64 [B].

    Cumulative probability falls along a chain, so the best of all chains are prefixes of each
    (TETRIS, arXiv 2502.15197). Ties go to the earlier position.

    Args:
        probabilities: float32 [B, gamma], the draft's own probability of each of its tokens.
        budget: most drafts over the whole batch.
    """
    batch_size, gamma = probabilities.shape
    reach = probabilities.cumprod(1)
    order = torch.argsort(reach.T.flatten(), descending=True, stable=True)[: max(budget, 0)]
    chosen = torch.zeros(batch_size, dtype=torch.int64, device=order.device)
    return chosen.index_add_(0, order % batch_size, torch.ones_like(order))  # `bincount` would wait for the device


class _LogitsOnly:
    """The one field of SGLang's `LogitsProcessorOutput` that sampling reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.next_token_logits = logits


def _repeat_rows(info: Any, times: int) -> Any:
    """`info` with every request's parameters repeated for each of its rows."""
    if times == 1:
        return info
    rows = {name: getattr(info, name) for name in _PER_REQUEST}
    repeated = {name: row.repeat_interleave(times, dim=0) for name, row in rows.items() if row is not None}
    return dataclasses.replace(info, **repeated)
