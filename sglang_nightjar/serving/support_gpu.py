"""What our own speculative worker does not serve on a GPU: refused at start, by the name of its flag.

It has not been run on a GPU, so what it takes is what was read for it in SGLang's source. Without it, and by default, a
GPU has SGLang's own worker, which these rules do not concern.
"""

from sglang_nightjar.serving.support import Closed, Refusal, given, other_algorithm, other_than

BACKENDS = (None, "fa3", "flashinfer", "triton")
_OTHER = "choose fa3, flashinfer or triton: the others have not been read for Nightjar's GPU worker"
_PLAIN = "leave it out; the KV cache has the model's precision"

WITH_OWN_WORKER = (
    Refusal("speculative_algorithm", other_algorithm, "use STANDALONE with --speculative-draft-model-path"),
    Refusal("attention_backend", other_than(*BACKENDS), _OTHER),
    Refusal("prefill_attention_backend", other_than(*BACKENDS), _OTHER),
    Refusal("decode_attention_backend", other_than(*BACKENDS), _OTHER),
    Refusal("speculative_draft_attention_backend", other_than(*BACKENDS), _OTHER),
    Refusal("kv_cache_dtype", other_than("auto", "bfloat16", "bf16"), _PLAIN),
    Refusal("is_embedding", given, "serve a generative model"),
    Refusal("enable_dynamic_chunking", given, "use --chunked-prefill-size"),
    Refusal("enable_prefill_delayer", given, "leave it out; it serves data-parallel attention"),
    Refusal("prefill_only_disable_kv_cache", given, "serve a generative model"),
)

_LEAVE = "leave it out; Nightjar's GPU worker has not been written for it"
CLOSED_WITH_OWN_WORKER = {
    "parallel": Closed("use --tp-size, on one machine", "nccl_port dist_timeout dist_init_addr tp_size"),
    "memory": Closed(
        "leave it out; the radix cache in device memory is the only tier",
        "radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_radix_cache",
    ),
    "spec": Closed(
        _LEAVE,
        "speculative_algorithm speculative_draft_model_path speculative_draft_model_revision "
        "speculative_draft_load_format speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
        "speculative_draft_attention_backend speculative_draft_model_quantization",
    ),
    "exec.graph": Closed(
        _LEAVE,
        "disable_cuda_graph disable_prefill_cuda_graph disable_decode_cuda_graph cuda_graph_config "
        "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill "
        "cuda_graph_bs_decode cuda_graph_bs_prefill disable_cuda_graph_padding enable_cudagraph_gc",
    ),
    "exec.features": Closed(_LEAVE, "disable_outlines_disk_cache sampling_mask_max_tokens"),
    "exec.mamba": Closed(_LEAVE),
    "exec.moe": Closed(_LEAVE),
    "exec.overlap": Closed(_LEAVE),
    "exec.offload": Closed(_LEAVE),
    "exec.comm": Closed(_LEAVE, "disable_custom_all_reduce enable_nccl_nvls pre_warm_nccl"),
    "exec.deterministic": Closed(_LEAVE, "enable_deterministic_inference"),
    "exec.dllm": Closed("serve an autoregressive model"),
    "disagg": Closed("leave it out; one process does prefill, decode and drafting"),
    "lora": Closed("merge the adapter into the checkpoint"),
    "mm": Closed("serve a text model"),
}
