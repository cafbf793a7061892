"""Every name of SGLang that Nightjar uses, in one list, checked before anything is installed.

One line per name, below the module that defines it:

    name                    it exists
    name(a, b)              it exists and its parameters are exactly these, in order
    name(a, b, ...)         it exists and has at least these parameters
    Class{x, y}             the class has these attributes
    Class.method(a, b)      as for functions; `self` left out

Where we subclass or replace, the parameters are exact; where we only call, those we pass.
"""

import importlib.metadata
import re

import msgspec

from sglang_nightjar.errors import UserError
from sglang_nightjar.patches.source_scan import Definition, module_definitions, package_root

SGLANG_VERSION = "0.5.23"

_CONTRACT = """
kernels.fused_op
    BaseFusedOp.register_oot_forward(op_cls, fn, platform_key)
kernels.ops.sampling.murmur_hash
    murmur_hash32(seed, positions, col_indices)
launch_server
    run_server(server_args)
srt.arg_groups.arg_utils
    namespace_of
srt.arg_groups.choices
    add_attention_backend_choices
    add_deterministic_attention_backend_choices
    add_draft_attention_backend_choices
    add_quantization_method_choices
    add_radix_supported_deterministic_attention_backend_choices
srt.batch_invariant_ops.batch_invariant_ops
    enable_batch_invariant_mode(enable_bmm)
srt.configs.model_config
    ModelConfig.get_num_kv_heads(tensor_parallel_size, ...)
    ModelConfig{num_hidden_layers, head_dim}
srt.entrypoints.http_server
    app
    _global_state
srt.entrypoints.engine
    Engine{shutdown, generate}
    _set_envs_and_config(server_args)
srt.layers.attention.attention_registry
    register_attention_backend(name)
srt.layers.attention.base_attn_backend
    AttentionBackend
    AttentionBackend.init_forward_metadata(forward_batch)
    AttentionBackend.forward(q, k, v, layer, forward_batch, save_kv_cache)
    AttentionBackend.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
    AttentionBackend.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
    AttentionBackend.support_triton()
    AttentionBackend.get_cuda_graph_seq_len_fill_value()
    AttentionBackend.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)
srt.layers.layernorm
    RMSNorm.forward_native(x, residual, post_residual_addition, quant_linear)
    RMSNorm{hidden_size, variance_size_override, cast_x_before_out_mul, variance_epsilon}
srt.layers.linear
    LinearBase{quant_method}
srt.layers.logits_processor
    LogitsProcessorOutput{next_token_logits}
srt.layers.logprob_processor
    compute_spec_logprobs(batch, logits_output, predict, accept_index, ...)
srt.layers.quantization
    QUANTIZATION_METHODS
srt.layers.quantization.base_config
    QuantizationConfig
    QuantizationConfig.get_name()
    QuantizationConfig.get_supported_act_dtypes()
    QuantizationConfig.get_min_capability()
    QuantizationConfig.get_config_filenames()
    QuantizationConfig.from_config(config)
    QuantizationConfig.get_quant_method(layer, prefix)
    QuantizationConfig.get_scaled_act_names()
    QuantizeMethodBase.process_weights_after_loading(layer)
    QuantizeMethodBase.restore_weights_before_loading(layer)
srt.layers.quantization.unquant
    UnquantizedEmbeddingMethod
    UnquantizedEmbeddingMethod.apply(layer, x, bias)
    UnquantizedEmbeddingMethod.embedding(layer, input_)
    UnquantizedLinearMethod
    UnquantizedLinearMethod.apply(layer, x, bias)
srt.layers.radix_attention
    AttentionType{DECODER}
    RadixAttention{layer_id, tp_q_head_num, qk_head_dim, v_head_dim, scaling, sliding_window_size, logit_cap}
    RadixAttention{is_cross_attention, attn_type}
srt.layers.rotary_embedding.base
    RotaryEmbedding.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    RotaryEmbedding{head_size, rotary_dim, is_neox_style}
srt.layers.sampler
    Sampler
    Sampler.forward(logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, ...)
srt.layers.vocab_parallel_embedding
    VocabParallelEmbedding{quant_method}
srt.managers.io_struct
    SetInternalStateReq
srt.managers.schedule_batch
    ReqKvInfo{req_pool_idx, kv_allocated_len, kv_committed_len}
    Req{is_retracted, kv, cached_tokens}
    Req{rid, origin_input_ids, output_ids, sampling_params, eos_token_ids, tokenizer}
    Req{finished, finished_len, grammar, to_finish}
    Req.update_finish_state(new_accepted_len)
    ScheduleBatch{reqs, forward_mode, input_ids, out_cache_loc, req_pool_indices}
    ScheduleBatch{seq_lens, seq_lens_cpu, seq_lens_sum, prefix_lens, extend_lens, extend_num_tokens}
    ScheduleBatch{after_idle_gap, launch_ts, batch_is_full, is_empty, orig_seq_lens}
    ScheduleBatch{spec_info, sampling_info, has_grammar, return_logprob}
srt.managers.scheduler
    Scheduler.ingest_requests(stop_at_pause)
    Scheduler.process_batch_result(batch, result)
    Scheduler.emit_metrics_constants()
    Scheduler.maybe_sleep_on_idle()
    Scheduler{running_batch, last_batch, chunked_req, waiting_queue, token_to_kv_pool_allocator, tree_cache}
    Scheduler{max_total_num_tokens, max_running_requests, tp_worker}
    Scheduler{invariant_checker, pool_stats_observer, load_inquirer, kv_events_publisher}
srt.managers.scheduler_components.internal_state
    SchedulerInternalStateController._add_speculative(state)
    SchedulerInternalStateController._update_handlers()
    UpdateRejected
    _UpdateHandler(validate, apply)
srt.managers.scheduler_components.invariant_checker
    SchedulerInvariantChecker{max_total_num_tokens}
srt.managers.scheduler_components.kv_events_publisher
    SchedulerKvEventsPublisher{max_total_num_tokens}
srt.managers.scheduler_components.load_inquirer
    SchedulerLoadInquirer{max_total_num_tokens}
srt.managers.scheduler_components.pool_stats_observer
    SchedulerPoolStatsObserver{max_total_num_tokens}
srt.managers.scheduler_components.request_receiver
    SchedulerRequestReceiver._broadcast_reqs_across_ranks(recv_reqs, local_reqs)
srt.managers.tokenizer_manager
    TokenizerManager{model_config, server_args, update_weights_from_disk}
    TokenizerManager._validate_one_request(obj, input_ids)
srt.managers.tokenizer_control_mixin
    TokenizerControlMixin.start_expert_distribution_record()
    TokenizerControlMixin.stop_expert_distribution_record()
    TokenizerControlMixin.dump_expert_distribution_record()
    TokenizerControlMixin.release_memory_occupation(obj, request)
    TokenizerControlMixin.resume_memory_occupation(obj, request)
    TokenizerControlMixin.set_internal_state(obj)
    TokenizerControlMixin{check_weights, update_weights_from_distributed, update_weights_from_ipc}
    TokenizerControlMixin{update_weights_from_tensor}
srt.managers.utils
    GenerationBatchResult{logits_output, next_token_ids, can_run_cuda_graph, speculative_num_draft_tokens}
    GenerationBatchResult{next_draft_input, accept_lens, accept_index, new_seq_lens}
srt.mem_cache.allocation
    assign_req_to_token_pool_func(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size)
    get_last_loc(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
srt.mem_cache.allocation_sizing
    get_alloc_reserve_per_decode()
srt.mem_cache.allocator.base
    BaseTokenToKVPoolAllocator.max_new_tokens_for_memory(input_tokens, max_new_tokens, token_capacity, ...)
    BaseTokenToKVPoolAllocator{available_size, get_all_free_pages, free_group, free_pages}
srt.mem_cache.allocator.paged
    PagedTokenToKVPoolAllocator(size, page_size, dtype, device, kvcache, need_sort)
    PagedTokenToKVPoolAllocator.alloc(need_size)
    PagedTokenToKVPoolAllocator.alloc_decode(seq_lens, seq_lens_cpu, last_loc)
    PagedTokenToKVPoolAllocator.clear()
    PagedTokenToKVPoolAllocator{staged_pages, num_staged_pages, free_page_ids}
srt.mem_cache.allocator.token
    TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
    TokenToKVPoolAllocator.alloc(need_size)
    TokenToKVPoolAllocator.clear()
    TokenToKVPoolAllocator{release_pages, free_page_ids}
srt.mem_cache.base_prefix_cache
    EvictParams{num_tokens}
    EvictResult{num_tokens_evicted}
srt.mem_cache.kv_cache_configurator
    KVCacheConfigurator._build_token_to_kv_pool_allocator
srt.mem_cache.memory_pool
    KVWriteLoc
    KVCache{size, page_size, layer_num, store_dtype}
    MHATokenToKVPool{k_buffer, v_buffer}
    MHATokenToKVPool._build_kv_buffer_descs()
    MHATokenToKVPool._create_buffers_normal()
    MHATokenToKVPool._kv_buffer_shapes()
    MHATokenToKVPool.get_kv_size_bytes()
    MHATokenToKVPool._init_kv_copy_and_warmup()
    MHATokenToKVPool._move_kv_cache_impl(tgt_loc, src_loc)
    MHATokenToKVPool.get_key_buffer(layer_id)
    MHATokenToKVPool.get_value_buffer(layer_id)
    MHATokenToKVPool.set_kv_buffer(layer, loc_info, cache_k, cache_v, ...)
    ReqToTokenPool{req_to_token}
    move_kv_cache_native(k_buffer, v_buffer, tgt_loc, src_loc)
srt.mem_cache.rust_tree_core.adapter
    RustUnifiedTreeCore.begin_insert(params)
    RustUnifiedTreeCore.collect_path_info(end_node_ids)
    RustUnifiedTreeCore.get_component_device_value(node_id, component_type)
    RustUnifiedTreeCore.reset()
    RustUnifiedTreeCore.match_prefix(params)
    RustUnifiedTreeCore.resume_insert()
    RustUnifiedTreeCore.total_size()
    RustUnifiedTreeCore.walk_for_kv_canary(unlocked_only, swa_resident_only)
srt.mem_cache.unified_cache.component_type
    ComponentType{FULL}
srt.mem_cache.unified_cache.tree_core_registry
    register_tree_core_backend(name, factory)
    resolve_tree_core_backend(name, params)
srt.mem_cache.unified_cache.unified_tree_core_interface
    InsertStepResult{result}
    TreePathNodeInfo{node_id, parent_id, full_value_len, num_children}
srt.mem_cache.unified_radix_cache
    UnifiedRadixCache.evict(params)
    UnifiedRadixCache._evict_device_leaf(node_id, tracker)
    UnifiedRadixCache{tree_core, tree_components, evictable_size}
srt.model_executor.forward_batch_info
    CaptureHiddenMode{NULL}
    ForwardBatch{batch_size, extend_seq_lens, forward_mode, input_ids, out_cache_loc, positions, req_pool_indices}
    ForwardBatch{return_logprob, seq_lens, seq_lens_cpu, spec_info}
    ForwardBatch.init_new(batch, model_runner, capture_hidden_mode, return_hidden_states_before_norm, ...)
    ForwardMode{DECODE, DRAFT_EXTEND_V2, EXTEND, is_decode, is_extend, is_idle, is_target_verify}
srt.model_executor.model_runner
    ModelRunner{max_total_num_tokens, attn_backend, model_config, req_to_token_pool, sampler, token_to_kv_pool}
    ModelRunner.forward(forward_batch, ...)
srt.models.llama
    LlamaAttention{qkv_proj, o_proj, rotary_emb, attn, num_heads, num_kv_heads, head_dim, scaling}
    LlamaDecoderLayer{self_attn, mlp, input_layernorm, post_attention_layernorm}
    LlamaForCausalLM{model, lm_head}
    LlamaMLP{gate_up_proj, down_proj}
    LlamaModel{embed_tokens, layers, norm}
srt.platforms
    current_platform
srt.platforms.cpu
    CpuDeviceMixin
srt.platforms.device_mixin
    DeviceMixin.get_torch_profiler_activity()
    DeviceMixin.get_torch_profiler_activity_str()
    PlatformEnum{OOT}
srt.platforms.interface
    PlatformCapabilities
    SRTPlatform
    SRTPlatform.get_default_attention_backend()
    SRTPlatform.get_dispatch_key_name()
    SRTPlatform.get_default_speculative_draft_attention_backend(algorithm)
    SRTPlatform.get_kv_pool_cls(kind)
    SRTPlatform.get_paged_allocator_cls()
    SRTPlatform.get_quantization_config(quantization)
    SRTPlatform.get_speculative_cache_locs_fn()
    SRTPlatform.get_speculative_worker_cls(algorithm)
    SRTPlatform.init_backend()
    SRTPlatform.post_load_model(model)
    SRTPlatform.supports_speculative_algorithm(algorithm)
    SRTPlatform.supports_speculative_draft_attention_backend(algorithm, backend)
srt.plugins
    load_plugins()
srt.plugins.hook_registry
    HookRegistry.apply_hooks()
    HookRegistry.register(target, hook, hook_type, ...)
    HookType{REPLACE}
srt.runtime_context
    get_device
    get_parallel
    get_schedule
    get_spec
srt.sampling.sampling_batch_info
    SamplingBatchInfo{temperatures, top_ps, top_ks, min_ps, sampling_seed, logit_bias, is_all_greedy, grammars}
srt.sampling.sampling_params
    SamplingParams{custom_params}
    SamplingParams{frequency_penalty, presence_penalty, repetition_penalty, min_new_tokens, stop_token_ids}
srt.server_args
    ServerArgs.add_cli_args(parser)
    ServerArgs.check_server_args()
    ServerArgs.resolve_once()
    prepare_server_args(argv)
srt.speculative.base_spec_worker
    BaseSpecWorker
srt.speculative.eagle_info
    EagleDraftExtendInput{positions, select_index, num_tokens_per_req}
    EagleDraftInput{bonus_tokens}
    EagleDraftInput.filter_batch(new_indices, new_indices_cpu)
    EagleDraftInput.merge_batch(spec_info)
    EagleVerifyInput{draft_token, custom_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling}
    EagleVerifyInput{retrieve_cum_len, spec_steps, topk, draft_token_num, capture_hidden_mode}
    EagleVerifyInput{seq_lens_sum, seq_lens_cpu}
srt.speculative.eagle_utils
    eagle_prepare_for_verify(verify_input, req_to_token_pool, batch, target_worker)
srt.speculative.spec_info
    SpeculativeAlgorithm.from_string(name)
srt.speculative.spec_utils
    GrammarTree.from_device(retrieve_next_token, retrieve_next_sibling, draft_token)
    build_grammar_vocab_mask(reqs, tree, sampling_info, device, barrier)
    draft_tp_context(layout)
srt.speculative.standalone_worker_v2
    StandaloneDraftWorker(server_args, gpu_id, nccl_port, target_worker)
    StandaloneDraftWorker{draft_runner, parallel_layout, req_to_token_pool, target_worker}
    StandaloneDraftWorker.alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
    StandaloneWorkerV2(server_args, gpu_id, nccl_port, target_worker)
srt.speculative.eagle_worker_v2
    EAGLEWorkerV2.forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
    EagleDraftWorker.init_attention_backend()
srt.utils.auth
    AuthLevel{ADMIN_OPTIONAL}
    auth_level(level)
srt.utils.common
    kill_process_tree
srt.utils.cuda_vmm_utils
    make_device_allocation_prop(device_id, handle_types, gpu_direct_rdma)
    make_rw_access_desc(device_id)
    tensor_from_pointer(pointer, nbytes, shape, dtype, device_id)
srt.utils.hf_transformers.common
    get_context_length(config)
srt.utils.hf_transformers.config
    get_config(model, trust_remote_code, model_override_args, ...)
srt.utils.server_args_config_parser
    ConfigArgumentMerger(parser, ...)
    ConfigArgumentMerger.merge_config_with_args(cli_args)
"""

_LINE = re.compile(r"(?P<name>[\w.]+)(?:\((?P<parameters>[^)]*)\)|\{(?P<members>[^}]*)\})?$")


class ContractError(UserError):
    """SGLang is not the one this code was written for; the message names every difference."""


class Entry(msgspec.Struct, frozen=True):
    """One line of the contract. `parameters` None: not checked; `open_ended`: more are allowed."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    open_ended: bool = False
    members: tuple[str, ...] = ()

    def drift(self, definitions: dict[str, Definition]) -> str | None:
        """What is different upstream, or None."""
        owner, _, method = self.name.partition(".")
        found = definitions.get(owner)
        if found is not None and method:
            found = (found.members or {}).get(method)
        full_name = f"sglang.{self.module}.{self.name}"
        if found is None:
            return f"{full_name} is gone"
        missing = [member for member in self.members if member not in (found.members or {})]
        if missing:
            return f"{full_name} has no {', '.join(missing)}"
        if self.parameters is None:
            return None
        present = found.parameters or ()
        if self.open_ended:
            missing = [name for name in self.parameters if name not in present]
            return f"{full_name} has no parameter {', '.join(missing)}" if missing else None
        if present != self.parameters:
            return f"{full_name} takes ({', '.join(present)}), not ({', '.join(self.parameters)})"
        return None


def entries(text: str = _CONTRACT) -> list[Entry]:
    """The contract, parsed."""
    parsed: list[Entry] = []
    module = ""
    for line in filter(str.strip, text.splitlines()):
        if not line.startswith(" "):
            module = line
            continue
        match = _LINE.match(line.strip())
        assert match is not None, f"malformed contract line: {line}"
        parameters, members = match["parameters"], match["members"]
        names = _names(parameters or "")
        parsed.append(
            Entry(
                module=module,
                name=match["name"],
                parameters=None if parameters is None else tuple(name for name in names if name != "..."),
                open_ended="..." in names,
                members=_names(members or ""),
            )
        )
    return parsed


def check_contract() -> int:
    """Compares the installed SGLang with the contract. Takes about a second; imports nothing of SGLang.

    Returns:
        The number of entries checked.
    Raises:
        ContractError: another version, or names that differ; every difference is in the message.
    """
    try:
        version = importlib.metadata.version("sglang")
        root = package_root("sglang")
    except ModuleNotFoundError:
        raise ContractError(f"sglang is not installed; run: pip install sglang=={SGLANG_VERSION}") from None
    contract = entries()
    problems = []
    for entry in contract:
        try:
            definitions = module_definitions(root, entry.module)
        except FileNotFoundError:
            problems.append(f"sglang.{entry.module} is gone")
            continue
        problem = entry.drift(definitions)
        if problem:
            problems.append(problem)
    if version != SGLANG_VERSION:
        problems.insert(0, f"this is sglang {version}, and Nightjar is written for {SGLANG_VERSION}")
    if problems:
        raise ContractError(
            f"{'; '.join(dict.fromkeys(problems))}. Install the pinned version: pip install sglang=={SGLANG_VERSION}"
        )
    return len(contract)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
