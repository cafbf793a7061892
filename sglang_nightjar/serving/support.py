"""What Nightjar does not support yet, each refused at start by the name of its flag.

Nothing runs half: an SGLang feature that our worker, our CPU platform or our tests do not
cover is refused with what to use instead, never silently ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang_nightjar.errors import UserError


class Refusal(msgspec.Struct, frozen=True):
    """A `ServerArgs` field, the values of it that are refused, and what to do instead."""

    field: str
    refuses: Callable[[Any], bool]
    instead: str


def _given(value: Any) -> bool:
    return value not in (None, False, "", [], "null", "none")


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


_WITH_ANY_DRAFT = (
    Refusal("speculative_adaptive", _given, "leave it out; Nightjar's own --nightjar-policy decides gamma"),
    Refusal("speculative_use_rejection_sampling", _given, "leave it out; verification is lossless sampling already"),
    Refusal("speculative_accept_threshold_single", _other_than(1.0), "leave it at 1.0; other values change the output"),
    Refusal("speculative_accept_threshold_acc", _other_than(1.0), "leave it at 1.0; other values change the output"),
    Refusal("speculative_eagle_topk", _other_than(1), "use 1; drafts are chains, not trees"),
    Refusal("speculative_token_map", _given, "leave it out; it belongs to EAGLE drafts"),
    Refusal("enable_custom_logit_processor", _given, "serve without a draft (--nightjar-policy off) to use it"),
    Refusal("enable_return_hidden_states", _given, "serve without a draft (--nightjar-policy off) to use it"),
    Refusal("enable_mixed_chunk", _given, "leave it out; chunked prefill works without it"),
)

_ON_CPU = (
    Refusal("speculative_algorithm", _other_than("STANDALONE"), "use STANDALONE with --speculative-draft-model-path"),
    Refusal("device", _other_than("cpu"), "leave it out, or use --nightjar-platform cuda on a machine with a GPU"),
    Refusal("dtype", _other_than("float32", "float"), "use float32"),
    Refusal("attention_backend", _other_than("nightjar_cpu"), "leave it out"),
    Refusal("prefill_attention_backend", _other_than("nightjar_cpu"), "leave it out"),
    Refusal("decode_attention_backend", _other_than("nightjar_cpu"), "leave it out"),
    Refusal("speculative_draft_attention_backend", _other_than("nightjar_cpu"), "leave it out"),
    Refusal("sampling_backend", _other_than("pytorch"), "leave it out"),
    Refusal("kv_cache_dtype", _other_than("auto", "float32"), "leave it out; the KV cache is float32"),
    Refusal("disable_overlap_schedule", lambda value: value is False, "leave it out; a CPU runs step by step"),
    Refusal("pp_size", _other_than(1), "use --tp-size"),
    Refusal("dp_size", _other_than(1), "start several servers"),
    Refusal("enable_dp_attention", _given, "use --tp-size"),
    Refusal("nnodes", _other_than(1), "serve on one machine"),
    Refusal("enable_lora", _given, "merge the adapter into the checkpoint"),
    Refusal("lora_paths", _given, "merge the adapter into the checkpoint"),
    Refusal("enable_hierarchical_cache", _given, "leave it out; the CPU's memory is the only tier"),
    Refusal("disaggregation_mode", _other_than("null"), "leave it out; prefill and decode share the process"),
    Refusal("enable_torch_compile", _given, "leave it out"),
    Refusal("enable_memory_saver", _given, "leave it out"),
    Refusal("is_embedding", _given, "serve a generative model"),
)

# Weight formats whose kernels need a GPU; ours are named nightjar_w8 to nightjar_w3.
_QUANTIZATION_FIELDS = ("quantization", "speculative_draft_model_quantization")


def refuse_unsupported(options: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Raises `UserError` for the first option that is not supported.

    Args:
        options: completed options, `ServerArgs` field names.
        on_cpu: whether the portable CPU platform will serve.
    """
    rules: tuple[Refusal, ...] = _ON_CPU if on_cpu else ()
    if options.get("speculative_algorithm") or options.get("speculative_draft_model_path"):
        rules += _WITH_ANY_DRAFT
    for rule in rules:
        value = options.get(rule.field)
        if rule.refuses(value):
            raise UserError(f"{_flag(rule.field)} {value} is not supported; {rule.instead}")
    if on_cpu:
        for field in _QUANTIZATION_FIELDS:
            value = options.get(field)
            if _given(value) and value != "unquant" and not str(value).startswith("nightjar_w"):
                raise UserError(
                    f"{_flag(field)} {value} is not supported on a CPU; use nightjar_w8 down to nightjar_w3"
                )


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
