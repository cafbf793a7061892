"""Seam: methods of `TokenizerManager`, where requests are turned away before they reach the scheduler.

Upstream lets pass some that end the scheduler on a CPU, and with it the server: a prompt of no
tokens (an empty text, where the tokenizer adds none), token ids the model has no row for, more
top logprobs than there are tokens, embeddings in place of tokens (upstream makes them half
precision), min_p where sampling is deterministic, and control requests that reach for a GPU.
"""

import re
from collections.abc import Callable
from typing import Any, NoReturn

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_nightjar.patches.hooks import require_applied
from sglang_nightjar.speculation.request_options import check_options

CLASS = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

_EMBEDDINGS = ("input_embeds", "positional_embed_overrides")
_GPU_ONLY = (
    "dump_expert_distribution_record",
    "release_memory_occupation",
    "resume_memory_occupation",
    "start_expert_distribution_record",
    "stop_expert_distribution_record",
)

# They would change the draft's weights behind its mirror's back, or while it is away.
_FIXED_WEIGHTS = (
    "check_weights",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)


def check_own_options(manager: Any, obj: Any, input_ids: Any) -> None:
    """Raises `ValueError` as `check_request` does, but only where what a request asks of Nightjar is malformed."""
    check_options((obj.sampling_params or {}).get("custom_params"))


def check_request(manager: Any, obj: Any, input_ids: Any) -> None:
    """Raises `ValueError`, which the server answers with HTTP 400, on a request the model cannot serve.

    Args:
        manager: the `TokenizerManager`.
        obj: the request, one of a batch.
        input_ids: its tokens, or None.
    """
    for name in _EMBEDDINGS:
        if getattr(obj, name, None) is not None:
            raise ValueError(f"{name} is not supported here; send text or input_ids.")
    params = obj.sampling_params or {}
    check_options(params.get("custom_params"))
    if params.get("min_p") and manager.server_args.enable_deterministic_inference:
        raise ValueError("min_p is not supported with --enable-deterministic-inference.")
    _check_patterns(params.get("stop_regex"))
    vocabulary = manager.model_config.vocab_size
    if (getattr(obj, "top_logprobs_num", None) or 0) > vocabulary:
        raise ValueError(f"top_logprobs_num is {obj.top_logprobs_num}; the vocabulary has {vocabulary} tokens.")
    if input_ids is None:
        return
    if len(input_ids) == 0:
        raise ValueError("The prompt has no tokens; send at least one character or token id.")
    strange = next((token for token in input_ids if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise ValueError(f"Token id {strange} is not in the vocabulary; ids are 0 to {vocabulary - 1}.")


def _check_patterns(patterns: Any) -> None:
    """Stop conditions given as regular expressions must be ones; upstream finds out after the answer has begun."""
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"stop_regex {pattern!r} is not a regular expression: {error}.") from None


def refuse_control(message: str) -> Callable[..., NoReturn]:
    """A hook that answers a control request with HTTP 400."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        from fastapi import HTTPException

        raise HTTPException(400, message)

    return refuse


def install(*, elastic: bool, on_cpu: bool = True) -> None:
    """Puts the checks before upstream's own, in the process that serves HTTP; raises `RuntimeError` if that fails.

    On a GPU, with our worker, weights stay what they are too: the graphs of a gamma are captured once.

    Unlike the other hooks they are applied here and now: they concern one process only, and importing
    what they hook takes seconds that a start with a mistake on its command line can do without.
    """
    messages = {name: f"{name} is not supported on a CPU." for name in _GPU_ONLY} if on_cpu else {}
    if elastic or not on_cpu:
        instead = "a draft that stays: start with --nightjar-elastic off" if on_cpu else "SGLang's own worker"
        messages |= {name: f"{name} needs {instead}." for name in _FIXED_WEIGHTS}
    check = check_request if on_cpu else check_own_options
    hooks = {"_validate_one_request": check, **{name: refuse_control(text) for name, text in messages.items()}}
    for name, hook in hooks.items():
        HookRegistry.register(f"{CLASS}.{name}", hook, HookType.BEFORE)
    HookRegistry.apply_hooks()
    require_applied(*(f"{CLASS}.{name}" for name in hooks))
