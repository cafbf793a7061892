"""Every name of SGLang that Nightjar uses, in one list; `contract_check.py` compares it with what is installed.

One line per name, below the module that defines it:

    name                    it exists
    name(a, b)              it exists and its parameters are exactly these, in order
    name(a, b, ...)         it exists and has at least these parameters
    Class{x, y}             the class has these attributes
    Class.method(a, b)      as for functions; `self` left out

Where we subclass or replace, the parameters are exact; where we only call, those we pass.
"""

SGLANG_VERSION = "0.5.23"

CONTRACT = """
benchmark.serving
    calculate_metrics(input_requests, outputs, ...)
    get_request(input_requests, request_rate, ...)
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
srt.arg_groups.speculative_hook
    _disable_overlap_schedule_for_cpu(server_args)
srt.batch_invariant_ops.batch_invariant_ops
    enable_batch_invariant_mode(enable_bmm)
srt.configs.hybrid_arch
    mambaish_config(model_config)
srt.configs.model_config
    AttentionArch{MHA}
    ModelConfig.get_num_kv_heads(tensor_parallel_size, ...)
    ModelConfig{num_hidden_layers, head_dim}
    ModelConfig{attention_arch, is_encoder_decoder, is_multimodal, model_path}
srt.entrypoints.http_server
    app
    _global_state
srt.entrypoints.engine
    Engine{shutdown, generate}
    _set_envs_and_config(server_args)
srt.environ
    envs
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
    LogitsProcessor(config, ...)
    LogitsProcessor._get_logits(hidden_states, lm_head, logits_metadata, ...)
    LogitsProcessor.forward(input_ids, hidden_states, lm_head, logits_metadata, ...)
    LogitsProcessorOutput{next_token_logits}
srt.layers.logprob_processor
    compute_spec_logprobs(batch, logits_output, predict, accept_index, chain_stride)
srt.layers.moe.utils
    speculative_moe_a2a_backend_context
    speculative_moe_backend_context
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
    BatchTokenizedGenerateReqInput{batch}
    SetInternalStateReq
    TokenizedGenerateReqInput{input_ids, sampling_params}
srt.managers.schedule_batch
    ReqKvInfo{req_pool_idx, kv_allocated_len, kv_committed_len}
    Req{is_retracted, kv, cached_tokens}
    Req{rid, origin_input_ids, output_ids, sampling_params, eos_token_ids, tokenizer}
    Req{finished, finished_len, grammar, to_finish, inflight_middle_chunks}
    Req.update_finish_state(new_accepted_len)
    ScheduleBatch{reqs, forward_mode, input_ids, out_cache_loc, req_pool_indices}
    ScheduleBatch{seq_lens, seq_lens_cpu, seq_lens_sum, prefix_lens, extend_lens, extend_num_tokens}
    ScheduleBatch{after_idle_gap, launch_ts, forward_iter, enable_overlap, batch_is_full, is_empty, orig_seq_lens}
    ScheduleBatch{spec_info, sampling_info, has_grammar, return_logprob}
    ScheduleBatch.retract_decode()
srt.managers.schedule_policy
    CLIP_MAX_NEW_TOKENS
srt.managers.scheduler
    Scheduler.ingest_requests(stop_at_pause)
    Scheduler.process_batch_result(batch, result)
    Scheduler.emit_metrics_constants()
    Scheduler.maybe_sleep_on_idle()
    Scheduler{running_batch, last_batch, chunked_req, waiting_queue, token_to_kv_pool_allocator, tree_cache}
    Scheduler{max_total_num_tokens, max_running_requests, new_token_ratio_tracker, tp_worker}
    Scheduler{event_loop_overlap, result_queue}
    Scheduler{invariant_checker, pool_stats_observer, load_inquirer, kv_events_publisher}
srt.managers.scheduler_components.output_streamer
    SchedulerOutputStreamer.build_additional_customized_info(reqs)
    SchedulerOutputStreamer{has_additional_customized_info}
srt.managers.scheduler_components.new_token_ratio_tracker
    NewTokenRatioTracker{current}
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
    GenerationBatchResult{next_draft_input, accept_lens, new_seq_lens, copy_done}
srt.mem_cache.allocation
    assign_req_to_token_pool_func(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size)
    get_last_loc(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
srt.mem_cache.allocation_sizing
    get_alloc_reserve_per_decode()
    get_req_to_token_extra_context_len()
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
    MHATokenToKVPool._create_buffers()
    MHATokenToKVPool._store_kv_layer(layer_idx, loc, cache_k, cache_v)
    MHATokenToKVPool{post_capture_active, use_hnd, is_quantized_kv_cache, alt_stream, device_module, row_dim, v_row_dim}
    MHATokenToKVPool._init_kv_copy_and_warmup()
    MHATokenToKVPool._move_kv_cache_impl(tgt_loc, src_loc)
    MHATokenToKVPool.get_key_buffer(layer_id)
    MHATokenToKVPool.get_value_buffer(layer_id)
    MHATokenToKVPool.set_kv_buffer(layer, loc_info, cache_k, cache_v, ...)
    ReqToTokenPool{req_to_token}
    _set_kv_buffer_impl(k, v, k_cache, v_cache, indices, row_dim, store_dtype, ...)
    _set_kv_buffer_impl(device_module, size_limit, alt_stream, v_row_dim, ...)
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
srt.model_executor.cuda_graph_config
    Backend{DISABLED}
    CudaGraphConfig{decode}
    Phase{DECODE}
    PhaseConfig{bs}
    check_cuda_graph_backend(phase, backend)
srt.model_executor.forward_context
    get_attn_backend()
srt.model_executor.forward_batch_info
    CaptureHiddenMode{NULL}
    ForwardBatch{batch_size, extend_seq_lens, forward_mode, input_ids, out_cache_loc, positions, req_pool_indices}
    ForwardBatch{return_logprob, seq_lens, seq_lens_cpu, spec_info}
    ForwardBatch.init_new(batch, model_runner, capture_hidden_mode, return_hidden_states_before_norm, ...)
    ForwardMode{DECODE, DRAFT_EXTEND_V2, EXTEND, is_decode, is_extend, is_idle, is_target_verify}
srt.model_executor.model_runner
    ModelRunner{max_total_num_tokens, attn_backend, model_config, req_to_token_pool, sampler, token_to_kv_pool}
    ModelRunner{decode_cuda_graph_runner, spec_algorithm, init_new_workspace, kv_cache_dtype, max_running_requests}
    ModelRunner{prefill_attention_backend_str, decode_attention_backend_str, is_hybrid_swa, device, gpu_id}
    ModelRunner._get_attention_backend(init_new_workspace)
    ModelRunner.forward(forward_batch, ...)
srt.model_executor.runner
    DecodeCudaGraphRunner
    get_batch_sizes_to_capture
srt.model_executor.runner.base_cuda_graph_runner
    get_batch_sizes_to_capture(model_runner, captured_req_width, ...)
srt.model_executor.runner.decode_cuda_graph_runner
    DecodeCudaGraphRunner(model_runner, attn_backend, speculative_num_steps, speculative_num_draft_tokens, ...)
    DecodeCudaGraphRunner{capture_bs, captured_req_width, capture_forward_mode, can_run_graph}
srt.models.registry
    import_model_classes(package_name, strict)
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
srt.platforms.cuda
    CudaSRTPlatform
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
    get_exec
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
    BaseSpecWorker.init_attention_backends()
    BaseSpecWorker{_additional_graph_memory_usage, last_shared_read_runner}
    EagleDraftWorkerBase{_specialized_graph_memory_usage}
srt.speculative.eagle_info
    EagleDraftExtendInput{positions, select_index, num_tokens_per_req}
    EagleDraftInput{bonus_tokens, future_indices}
    EagleDraftInput.filter_batch(new_indices, new_indices_cpu)
    EagleDraftInput.merge_batch(spec_info)
    EagleVerifyInput{draft_token, custom_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling}
    EagleVerifyInput{retrieve_cum_len, spec_steps, topk, draft_token_num, capture_hidden_mode}
    EagleVerifyInput{seq_lens_sum, seq_lens_cpu}
srt.speculative.eagle_utils
    default_tree_mask_mode()
    eagle_prepare_for_verify(verify_input, req_to_token_pool, batch, target_worker)
srt.speculative.eagle_worker_common
    build_eagle_verify_input(batch, draft_input, parent_list, top_scores_index, draft_tokens, draft_probs, ...)
    build_eagle_verify_input(target_worker, topk, num_steps, num_draft_tokens, tree_mask_mode, device, ...)
srt.speculative.spec_info
    SpeculativeAlgorithm.from_string(name)
    SpeculativeAlgorithm.get_platform_worker_cls()
    SpeculativeAlgorithm{NONE, STANDALONE}
srt.speculative.spec_utils
    GrammarTree.from_device(retrieve_next_token, retrieve_next_sibling, draft_token)
    build_grammar_vocab_mask(reqs, tree, sampling_info, device, barrier)
    draft_pp_context()
    draft_tp_context(layout)
srt.speculative.standalone_worker_v2
    StandaloneDraftWorker(server_args, gpu_id, nccl_port, target_worker)
    StandaloneDraftWorker{draft_runner, parallel_layout, req_to_token_pool, target_worker}
    StandaloneDraftWorker.alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
    StandaloneWorkerV2(server_args, gpu_id, nccl_port, target_worker)
srt.speculative.eagle_worker_v2
    EAGLEWorkerV2.forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
    EAGLEWorkerV2.init_cuda_graphs()
    EagleDraftWorker.init_attention_backend()
    EagleDraftWorker.init_cuda_graphs()
    EagleDraftWorker._capture_cuda_graphs()
srt.utils.auth
    AuthLevel{ADMIN_OPTIONAL}
    auth_level(level)
srt.utils.common
    get_available_gpu_memory(device, gpu_id, ...)
    kill_process_tree
srt.utils.hf_transformers.common
    get_context_length(config)
srt.utils.hf_transformers.config
    get_config(model, trust_remote_code, model_override_args, ...)
srt.utils.server_args_config_parser
    ConfigArgumentMerger(parser, ...)
    ConfigArgumentMerger.merge_config_with_args(cli_args)
"""
