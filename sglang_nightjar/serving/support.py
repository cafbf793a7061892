"""What Nightjar does not support yet, each refused at start by the name of its flag.

Nothing runs half: an SGLang feature that our worker, our CPU platform or our tests do not
cover is refused with what to use instead, never silently ignored. SGLang groups its
options in namespaces; most are closed on the CPU platform: what is not listed as working
there must keep SGLang's default.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang_nightjar.errors import UserError
from sglang_nightjar.platform.names import ATTENTION_BACKEND, QUANTIZATION


class Refusal(msgspec.Struct, frozen=True):
    """A `ServerArgs` field, the values of it that are refused, and what to do instead."""

    field: str
    refuses: Callable[[Any], bool]
    instead: str


class Closed(msgspec.Struct, frozen=True):
    """A namespace whose fields keep SGLang's default, except those that `works` names (see `_ON_CPU` for them)."""

    instead: str
    works: str = ""


def given(value: Any) -> bool:
    """Whether an option says anything."""
    return value not in (None, False, "", [], "null", "none")


def other_than(*allowed: Any) -> Callable[[Any], bool]:
    """Whether an option is given and is none of these."""
    return lambda value: value is not None and value not in allowed


def other_algorithm(value: Any) -> bool:
    """Whether an algorithm is given that our worker does not run."""
    return value is not None and str(value).upper() != "STANDALONE"


_OFF = "serve without a draft (--nightjar-policy off) to use it"

_WITH_ANY_DRAFT = (
    Refusal("speculative_adaptive", given, "leave it out; Nightjar's own --nightjar-policy decides gamma"),
    Refusal("speculative_adaptive_config", given, "leave it out; Nightjar's own --nightjar-policy decides gamma"),
    Refusal("speculative_use_rejection_sampling", given, "leave it out; verification is lossless sampling already"),
    Refusal("speculative_use_block_verification", given, "leave it out; verification is lossless sampling already"),
    Refusal("speculative_accept_threshold_single", other_than(1.0), "leave it at 1.0; other values change the output"),
    Refusal("speculative_accept_threshold_acc", other_than(1.0), "leave it at 1.0; other values change the output"),
    Refusal("speculative_eagle_topk", other_than(1), "use 1; drafts are chains, not trees"),
    Refusal("speculative_token_map", given, "leave it out; it belongs to EAGLE drafts"),
    Refusal("enable_multi_layer_eagle", given, "use STANDALONE with --speculative-draft-model-path"),
    Refusal("decoupled_spec_role", given, "leave it out; draft and target share a process"),
    Refusal("enable_custom_logit_processor", given, _OFF),
    Refusal("enable_return_hidden_states", given, _OFF),
    Refusal("return_hidden_states_mode", given, _OFF),
    Refusal("enable_mixed_chunk", given, "leave it out; chunked prefill works without it"),
)

_ON_CPU = (
    Refusal("speculative_algorithm", other_algorithm, "use STANDALONE with --speculative-draft-model-path"),
    Refusal("device", other_than("cpu"), "leave it out, or use --nightjar-platform cuda on a machine with a GPU"),
    Refusal("dtype", other_than("auto", "float32", "float"), "use float32"),
    Refusal("attention_backend", other_than(ATTENTION_BACKEND), "leave it out"),
    Refusal("prefill_attention_backend", other_than(ATTENTION_BACKEND), "leave it out"),
    Refusal("decode_attention_backend", other_than(ATTENTION_BACKEND), "leave it out"),
    Refusal("speculative_draft_attention_backend", other_than(ATTENTION_BACKEND), "leave it out"),
    Refusal("sampling_backend", other_than("pytorch"), "leave it out"),
    Refusal("kv_cache_dtype", other_than("auto", "float32"), "leave it out; the KV cache is float32"),
    Refusal("quantization", other_than("unquant"), "the target is float32; only the draft may be quantized"),
    Refusal(
        "speculative_draft_model_quantization",
        other_than("unquant", *QUANTIZATION),
        f"use one of: {', '.join(QUANTIZATION)}",
    ),
    Refusal("load_format", other_than("auto", "safetensors"), "use a checkpoint of *.safetensors files"),
    Refusal("speculative_draft_load_format", other_than("auto", "safetensors"), "use *.safetensors files"),
    Refusal("model_impl", other_than("auto", "sglang"), "leave it out"),
    Refusal("cuda_graph_backend_decode", other_than("disabled"), "leave it out; there are no CUDA graphs on a CPU"),
    Refusal("cuda_graph_backend_prefill", other_than("disabled"), "leave it out; there are no CUDA graphs on a CPU"),
    Refusal("pp_size", other_than(1), "use --tp-size"),
    Refusal("dp_size", other_than(1), "start several servers"),
    Refusal("nnodes", other_than(1), "serve on one machine"),
    Refusal("is_embedding", given, "serve a generative model"),
    Refusal("weight_cache_mode", other_than("off"), "leave it out; weights are read from the checkpoint's files"),
    # Namespaces that stay open: scheduling, HTTP serving, observability.
    Refusal("enable_mixed_chunk", given, "leave it out; chunked prefill works without it"),
    Refusal("enable_dynamic_chunking", given, "use --chunked-prefill-size"),
    Refusal("enable_prefill_delayer", given, "leave it out; it serves data-parallel attention"),
    Refusal("prefill_only_disable_kv_cache", given, "serve a generative model"),
    Refusal("max_mamba_cache_size", given, "leave it out; state-space models are not served on a CPU"),
    Refusal("tokenizer_worker_num", other_than(1), "use 1"),
    Refusal("detokenizer_worker_num", other_than(1), "use 1"),
    Refusal("smg_grpc_mode", given, "use the HTTP server"),
    Refusal("grpc_mode", given, "use the HTTP server"),
    Refusal("grpc_port", given, "use the HTTP server"),
    Refusal("sidecar", given, "use the HTTP server"),
    Refusal("enable_streaming_session", given, "send the whole conversation; the radix cache keeps its prefix"),
    Refusal("kv_canary", given, "leave it out; it runs on GPUs"),
    Refusal("forward_hooks", given, "leave it out"),
    Refusal("debug_tensor_dump_output_folder", given, "leave it out"),
    Refusal("msprobe_dump_config", given, "leave it out"),
)

_ON_GPU = (
    Refusal("quantization", QUANTIZATION.__contains__, "its kernels are a CPU's; use SGLang's own methods"),
    Refusal(
        "speculative_draft_model_quantization",
        QUANTIZATION.__contains__,
        "its kernels are a CPU's; use SGLang's own methods",
    ),
)

_LEAVE = "leave it out; "
_CLOSED_ON_CPU = {
    "model": Closed(
        "leave it out",
        "model_path load_format trust_remote_code context_length is_embedding revision model_impl dtype quantization "
        "json_model_override_args kv_cache_dtype download_dir weight_loader_disable_mmap weight_cache_mode "
        "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load",
    ),
    "device": Closed(
        "leave it out; it concerns other devices",
        "device random_seed watchdog_timeout soft_watchdog_timeout sleep_on_idle custom_sigquit_handler gc_threshold",
    ),
    "parallel": Closed(
        "use --tp-size, the only parallelism on a CPU",
        "nccl_port dist_timeout dist_init_addr tp_size pp_size dp_size nnodes node_rank",
    ),
    "memory": Closed(
        _LEAVE + "the radix cache in memory is the only tier",
        "radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_radix_cache",
    ),
    "spec": Closed(
        _LEAVE + "it belongs to other speculative algorithms than STANDALONE",
        "speculative_algorithm speculative_draft_model_path speculative_draft_model_revision "
        "speculative_draft_load_format speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
        "speculative_draft_attention_backend speculative_draft_model_quantization",
    ),
    "exec.kernel": Closed(
        _LEAVE + "it selects GPU kernels",
        "attention_backend prefill_attention_backend decode_attention_backend sampling_backend grammar_backend",
    ),
    "exec.graph": Closed(
        _LEAVE + "nothing is captured or compiled on a CPU",
        "disable_cuda_graph disable_prefill_cuda_graph disable_decode_cuda_graph "
        "cuda_graph_backend_decode cuda_graph_backend_prefill",
    ),
    "exec.features": Closed(
        _LEAVE + "it needs GPU kernels",
        "enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode "
        "sampling_mask_max_tokens disable_outlines_disk_cache",
    ),
    "exec.comm": Closed(_LEAVE + "ranks on a CPU talk over gloo", "disable_custom_all_reduce"),
    "exec.mamba": Closed(_LEAVE + "state-space models are not served on a CPU"),
    "exec.moe": Closed(_LEAVE + "mixtures of experts are not served on a CPU"),
    "exec.overlap": Closed(_LEAVE + "it overlaps two streams of a GPU"),
    "exec.offload": Closed(_LEAVE + "the weights are in the CPU's memory already"),
    "exec.dllm": Closed("serve an autoregressive model"),
    "exec.deterministic": Closed(
        _LEAVE + "--enable-deterministic-inference repeats requests by their sampling_seed",
        "enable_deterministic_inference",
    ),
    "disagg": Closed(_LEAVE + "one process does prefill, decode and drafting"),
    "lora": Closed("merge the adapter into the checkpoint"),
    "mm": Closed("serve a text model"),
}
_OPEN_ON_CPU = ("schedule", "serving", "observability")


def refuse_unsupported(options: Mapping[str, Any], *, on_cpu: bool, own_worker: bool = False) -> None:
    """Raises `UserError` for the first option that is not supported, or that SGLang does not know.

    Args:
        options: completed options, `ServerArgs` field names.
        on_cpu: whether the portable CPU platform will serve.
        own_worker: on a GPU, whether our speculative worker will, and not SGLang's.
    """
    rules: tuple[Refusal, ...] = _ON_CPU if on_cpu else _ON_GPU
    closed: Mapping[str, Closed] = _CLOSED_ON_CPU if on_cpu else {}
    if own_worker and not on_cpu:
        from sglang_nightjar.serving.support_gpu import CLOSED_WITH_OWN_WORKER, WITH_OWN_WORKER

        rules, closed = (*rules, *WITH_OWN_WORKER), CLOSED_WITH_OWN_WORKER
    with_draft = bool(options.get("speculative_algorithm") or options.get("speculative_draft_model_path"))
    for rule in (*rules, *(_WITH_ANY_DRAFT if with_draft else ())):
        value = options.get(rule.field)
        if rule.refuses(value):
            raise _refused(rule.field, value, rule.instead)
    _refuse_by_namespace(options, closed)


def _refuse_by_namespace(options: Mapping[str, Any], closed: Mapping[str, Closed]) -> None:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    namespaces: dict[str, str] = namespace_of(ServerArgs)
    defaults = {field.name: field for field in msgspec.structs.fields(ServerArgs)}
    for name, value in options.items():
        if name not in defaults:
            raise UserError(f"unknown option {name!r}; see --help of python -m sglang_nightjar.launch_server")
        rule = closed.get(namespaces.get(name, ""))
        if rule is not None and name not in rule.works.split() and not _is_default(value, defaults[name]):
            raise _refused(name, value, rule.instead)


def _is_default(value: Any, field: Any) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def flag(field: str) -> str:
    """A `ServerArgs` field as the command line has it."""
    return "--" + field.replace("_", "-")


def _refused(field: str, value: Any, instead: str) -> UserError:
    shown = flag(field) if value is True else f"{flag(field)} {value}"
    return UserError(f"{shown} is not supported; {instead}")
