"""What the worker on a GPU does not serve, found out from the models SGLang has loaded: refused, and never half run.

Options that ask for such things are refused before (`serving/support_gpu.py`); these are what a checkpoint says.
"""

from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from sglang_nightjar.errors import UserError

BACKENDS = ("fa3", "flashinfer", "triton")  # whose source says that they do what is asked of them here
_INSTEAD = "use SGLang's own worker (--nightjar-policy static:N) for this model"


def check_models(runner: Any) -> None:
    """`UserError` where the model of `runner` needs what our steps leave out.

    A verification of ours samples and commits; SGLang's also moves state of state-space layers and sparse attention
    along (`run_eagle_verify`), which full multi-head attention has none of.
    """
    config = runner.model_config
    reasons = {
        "is not a decoder with multi-head or grouped-query attention": config.attention_arch != AttentionArch.MHA,
        "has sliding-window layers with a KV pool of their own": runner.is_hybrid_swa,
        "has state-space or linear-attention layers": mambaish_config(config) is not None,
        "is an encoder-decoder": config.is_encoder_decoder,
        "reads more than text": config.is_multimodal,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise UserError(f"{config.model_path} {reason}, which Nightjar's GPU worker does not serve; {_INSTEAD}")


def check_backends(runner: Any) -> None:
    """`UserError` where SGLang chose an attention backend that nobody has read for this."""
    for backend in (runner.prefill_attention_backend_str, runner.decode_attention_backend_str):
        if backend not in BACKENDS:
            raise UserError(
                f"the attention backend is {backend}; Nightjar's GPU worker is written for {', '.join(BACKENDS)}: "
                "choose one by --attention-backend (and --speculative-draft-attention-backend)"
            )


def check_movable(runner: Any) -> None:
    """`UserError` where the weights of `runner`'s model do not survive being moved onto an arena as they lie."""
    for name, tensor in (*runner.model.named_parameters(), *runner.model.named_buffers()):
        if not tensor.is_contiguous():
            raise UserError(
                f"the draft's {name} is not contiguous (strides {tensor.stride()}), as in a quantized checkpoint; "
                "use a plain draft, or set --nightjar-elastic off"
            )
