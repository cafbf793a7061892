"""Test support: what SGLang itself does with the logits of one position, without speculation and without a server."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers import sampler as upstream
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 50
EOS, END_OF_TURN, CONFIGURED_STOP = 2, 7, 11  # as named by the tokenizer, its additions, the model's configuration


def make_request(output: Sequence[int], **params: Any) -> Any:
    """What sampling reads of SGLang's `Req`."""
    return SimpleNamespace(
        rid="test",
        sampling_params=SamplingParams(**params),
        origin_input_ids=array("q", [3, 4, 5]),
        output_ids=array("q", output),
        eos_token_ids={CONFIGURED_STOP},
        tokenizer=SimpleNamespace(eos_token_id=EOS, additional_stop_token_ids={END_OF_TURN}),
        custom_logit_processor=None,
        return_sampling_mask=False,
    )


class Batch:
    """What `SamplingBatchInfo` reads of SGLang's `ScheduleBatch`."""

    device = "cpu"

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs


@contextmanager
def sampling_context(*, seeded: bool) -> Iterator[None]:
    """The configuration a server on the CPU platform would have published."""
    with (
        get_context().override_server_args(sampling_backend="pytorch", enable_deterministic_inference=seeded),
        get_parallel().override(tp_group=SimpleNamespace(device_group=None)),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def sampling_info(reqs: list[Any]) -> tuple[Any, Batch]:
    """A fresh `SamplingBatchInfo`, and the batch it refers to weakly."""
    batch = Batch(reqs)
    return SamplingBatchInfo.from_schedule_batch(batch, VOCAB), batch


def plain_step(
    logits: torch.Tensor, reqs: list[Any], outputs: Sequence[Sequence[int]], grammar_mask: Any = None
) -> tuple[torch.Tensor, Any]:
    """Adjusts `logits` [B, V] in place as a plain decode does after `outputs` [B] (of equal length or B = 1).

    Returns:
        `logits`, and the `SamplingBatchInfo` to sample with.
    """
    info, _batch = sampling_info(reqs)
    for tokens in zip(*outputs, strict=True):  # a plain server feeds its penalizers one token a step
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(tokens))
    info = info.copy_for_forward()
    info.grammar_mask = grammar_mask
    info.apply_logits_bias(logits)
    return logits, info


def plain_sample(logits: torch.Tensor, info: Any, positions: torch.Tensor) -> torch.Tensor:
    """Draws with SGLang's own sampler; `logits` are overwritten."""
    return upstream.Sampler()(LogitsProcessorOutput(next_token_logits=logits), info, False, [], [], positions)
