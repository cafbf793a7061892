"""What is refused at start, by the name of its flag; and that every SGLang option is decided on."""

from typing import Any

import msgspec
import pytest
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.server_args import ServerArgs

from sglang_nightjar.errors import UserError
from sglang_nightjar.serving import support, support_gpu
from sglang_nightjar.serving.support import refuse_unsupported

NAMESPACES: dict[str, str] = namespace_of(ServerArgs)
DRAFT = {"speculative_draft_model_path": "/draft", "speculative_algorithm": "STANDALONE"}


def complaint(options: dict[str, Any], *, on_cpu: bool = True, own_worker: bool = False) -> str:
    with pytest.raises(UserError) as raised:
        refuse_unsupported(options, on_cpu=on_cpu, own_worker=own_worker)
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"speculative_algorithm": "NGRAM"}, "use STANDALONE"),
        ({"speculative_algorithm": "EAGLE"}, "use STANDALONE"),
        ({"speculative_algorithm": "EAGLE3"}, "use STANDALONE"),
        ({"speculative_algorithm": "eagle"}, "use STANDALONE"),
        ({"speculative_algorithm": "DFLASH"}, "use STANDALONE"),
        ({"speculative_eagle_topk": 4, **DRAFT}, "drafts are chains"),
        ({"speculative_adaptive": True, **DRAFT}, "--nightjar-policy"),
        ({"speculative_use_rejection_sampling": True, **DRAFT}, "lossless"),
        ({"speculative_accept_threshold_single": 0.9, **DRAFT}, "leave it at 1.0"),
        ({"speculative_ngram_capacity": 5}, "other speculative algorithms"),
        ({"enable_dp_attention": True}, "use --tp-size"),
        ({"attn_dp_size": 2}, "use --tp-size"),
        ({"dp_size": 2}, "several servers"),
        ({"pp_size": 2}, "use --tp-size"),
        ({"ep_size": 2}, "use --tp-size"),
        ({"nnodes": 2}, "one machine"),
        ({"enable_lora": True}, "merge the adapter"),
        ({"lora_paths": ["a=/a"]}, "merge the adapter"),
        ({"dtype": "bfloat16"}, "use float32"),
        ({"dtype": "half"}, "use float32"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "float32"),
        ({"quantization": "awq"}, "only the draft"),
        ({"quantization": "nightjar_w8"}, "only the draft"),
        ({"speculative_draft_model_quantization": "fp8", **DRAFT}, "nightjar_w8"),
        ({"modelopt_quant": "fp8"}, "leave it out"),
        ({"load_format": "gguf"}, "safetensors"),
        ({"load_format": "dummy"}, "safetensors"),
        ({"model_impl": "transformers"}, "leave it out"),
        ({"device": "cuda"}, "--nightjar-platform cuda"),
        ({"attention_backend": "triton"}, "leave it out"),
        ({"sampling_backend": "flashinfer"}, "leave it out"),
        ({"enable_mixed_chunk": True}, "chunked prefill"),
        ({"enable_two_batch_overlap": True}, "two streams"),
        ({"enable_pdmux": True}, "one process"),
        ({"disaggregation_mode": "prefill"}, "one process"),
        ({"cpu_offload_gb": 4}, "memory already"),
        ({"enable_hierarchical_cache": True}, "only tier"),
        ({"enable_hisparse": True}, "only tier"),
        ({"enable_lmcache": True}, "only tier"),
        ({"enable_memory_saver": True}, "leave it out"),
        ({"enable_watermark": True}, "leave it out"),
        ({"enable_torch_compile": True}, "compiled"),
        ({"cuda_graph_max_bs_decode": 8}, "compiled"),
        ({"cuda_graph_backend_decode": "full"}, "no CUDA graphs"),
        ({"enable_multimodal": True}, "text model"),
        ({"dllm_algorithm": "LowConfidence"}, "autoregressive"),
        ({"is_embedding": True}, "generative"),
        ({"rl_on_policy_target": "fsdp"}, "sampling_seed"),
        ({"enable_eplb": True}, "mixtures of experts"),
        ({"max_mamba_cache_size": 8}, "state-space"),
        ({"weight_cache_mode": "daemon"}, "files"),
        ({"smg_grpc_mode": True}, "HTTP server"),
        ({"grpc_port": 5}, "HTTP server"),
        ({"enable_streaming_session": True}, "radix cache"),
        ({"tokenizer_worker_num": 2}, "use 1"),
        ({"use_ray": True}, "other devices"),
        ({"kv_canary": "log"}, "GPUs"),
        ({"enable_return_hidden_states": True, **DRAFT}, "--nightjar-policy off"),
        ({"return_hidden_states_mode": "last", **DRAFT}, "--nightjar-policy off"),
        ({"enable_custom_logit_processor": True, **DRAFT}, "--nightjar-policy off"),
    ],
    ids=lambda value: ",".join(f"{name}={given}" for name, given in value.items()) if isinstance(value, dict) else None,
)
def test_refused_on_a_cpu(options: dict[str, Any], instead: str) -> None:
    message = complaint(options)
    name = next(iter(options))
    assert message.startswith(f"{support.flag(name)} ")
    assert "is not supported; " in message
    assert instead in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tp_size": 2, "page_size": 16, "context_length": 512, "random_seed": 3},
        {"speculative_algorithm": "standalone", "speculative_draft_model_path": "/d", "speculative_eagle_topk": 1},
        {"speculative_draft_model_quantization": "nightjar_w3", **DRAFT},
        {"enable_return_hidden_states": True},
        {"enable_custom_logit_processor": True},
        {"disable_radix_cache": True, "radix_eviction_policy": "lfu"},
        {"disable_overlap_schedule": True},
        {"schedule_policy": "lpm", "enable_metrics": True, "api_key": "secret", "log_level": "warning"},
        {"reasoning_parser": "qwen3", "grammar_backend": "xgrammar", "allow_auto_truncate": True},
    ],
    ids=lambda options: ",".join(options) or "none",
)
def test_supported_on_a_cpu(options: dict[str, Any]) -> None:
    refuse_unsupported(options, on_cpu=True)


def test_everything_at_sglangs_default_is_supported() -> None:
    defaults = {
        field.name: field.default
        for field in msgspec.structs.fields(ServerArgs)
        if field.default is not msgspec.NODEFAULT
    }
    refuse_unsupported(defaults, on_cpu=True)


def test_a_gpu_keeps_sglangs_own_features_but_not_with_a_draft() -> None:
    options = {"enable_lora": True, "dtype": "bfloat16", "attention_backend": "triton", "enable_mixed_chunk": True}
    refuse_unsupported(options, on_cpu=False)
    assert "chunked prefill" in complaint({**options, **DRAFT}, on_cpu=False)
    assert "kernels are a CPU's" in complaint({"quantization": "nightjar_w8"}, on_cpu=False)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "use STANDALONE"),
        ({"attention_backend": "trtllm_mha", **DRAFT}, "fa3, flashinfer or triton"),
        ({"speculative_draft_attention_backend": "fa4", **DRAFT}, "fa3, flashinfer or triton"),
        ({"kv_cache_dtype": "fp8_e4m3", **DRAFT}, "the model's precision"),
        ({"nnodes": 2, **DRAFT}, "on one machine"),
        ({"pp_size": 2, **DRAFT}, "use --tp-size"),
        ({"attn_dp_size": 2, **DRAFT}, "use --tp-size"),
        ({"enable_lora": True, **DRAFT}, "merge the adapter"),
        ({"enable_hierarchical_cache": True, **DRAFT}, "only tier"),
        ({"enable_memory_saver": True, **DRAFT}, "has not been written for it"),
        ({"enable_two_batch_overlap": True, **DRAFT}, "has not been written for it"),
        ({"enable_torch_compile": True, **DRAFT}, "has not been written for it"),
        ({"disaggregation_mode": "prefill", **DRAFT}, "one process"),
        ({"quantization": "nightjar_w8", **DRAFT}, "kernels are a CPU's"),
        ({"enable_mixed_chunk": True, **DRAFT}, "chunked prefill"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_refused_on_a_gpu_with_our_worker(options: dict[str, Any], instead: str) -> None:
    message = complaint(options, on_cpu=False, own_worker=True)
    assert message.startswith(f"{support.flag(next(iter(options)))} ") and instead in message


def test_supported_on_a_gpu_with_our_worker() -> None:
    options = {
        **DRAFT,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "tp_size": 2,
        "page_size": 64,
        "attention_backend": "fa3",
        "cuda_graph_bs_decode": [1, 2, 4],
        "mem_fraction_static": 0.7,
    }
    refuse_unsupported(options, on_cpu=False, own_worker=True)


def test_an_option_sglang_does_not_know() -> None:
    assert complaint({"model_pat": "/m"}).startswith("unknown option 'model_pat'")
    assert complaint({"model_pat": "/m"}, on_cpu=False).startswith("unknown option 'model_pat'")


def test_every_namespace_of_sglang_is_decided_on() -> None:
    assert set(NAMESPACES.values()) == {*support._CLOSED_ON_CPU, *support._OPEN_ON_CPU}


def test_every_name_in_the_tables_is_an_option_of_sglang() -> None:
    rules = (*support._ON_CPU, *support._WITH_ANY_DRAFT, *support._ON_GPU, *support_gpu.WITH_OWN_WORKER)
    assert {rule.field for rule in rules} <= set(NAMESPACES)
    for namespace, closed in (*support._CLOSED_ON_CPU.items(), *support_gpu.CLOSED_WITH_OWN_WORKER.items()):
        elsewhere = [name for name in closed.works.split() if NAMESPACES.get(name) != namespace]
        assert elsewhere == [], f"not in namespace {namespace}"


def test_a_closed_namespace_refuses_each_of_its_other_options() -> None:
    """Whatever value is not the default; a value of another type is refused before its type could matter."""
    for name, namespace in NAMESPACES.items():
        closed = support._CLOSED_ON_CPU.get(namespace)
        if closed is not None and name not in closed.works.split():
            assert f"{support.flag(name)} surprise is not supported; " in complaint({name: "surprise"})
