"""Table of the vLLM names that the server uses. installed_vllm.py checks it before a model is loaded.

A name is listed under its module, or under alternatives ("a or b"), and a member as "Class.member".
Parameters before a `/` are positional: they must be the first ones, in this order. Parameters after it are
passed by name. Public names are documented or exported by vLLM (`__all__`, EngineClient, exceptions that a
client sees). All others are private, with a reason.
Invariant: the table has every vLLM name that the packages import, patch or override (test_vllm_names.py).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

Names = Mapping[str, Mapping[str, str]]
"""Names by module, with the parameters of each."""


class Private(NamedTuple):
    """Private names that are used together. vLLM may change them without notice."""

    reason: str
    names: Names


PUBLIC: Names = {
    "vllm": {
        "SamplingParams": "/ n, seed, temperature, top_p, top_k, max_tokens, stop_token_ids, logprobs, "
        "prompt_logprobs, flat_logprobs, stop, detokenize, skip_special_tokens, output_kind, stream_interval, "
        "skip_clone, routed_experts_prompt_start",
    },
    "vllm.config": {
        "ModelConfig": "",
        "ModelConfig.dtype": "", "ModelConfig.get_vocab_size": "", "ModelConfig.is_moe": "",
        "ModelConfig.get_num_experts": "", "ModelConfig.get_num_experts_per_tok": "",
        "ModelConfig.get_total_num_hidden_layers": "",
        "ModelConfig.max_model_len": "", "ModelConfig.registry": "", "ModelConfig.architectures": "",
        "ParallelConfig.data_parallel_index": "", "ParallelConfig.node_rank": "", "ParallelConfig.world_size": "",
        "SchedulerConfig.get_scheduler_cls": "", "SchedulerConfig.max_num_active_seqs": "",
        "SchedulerConfig.max_num_seqs": "",
        "SchedulerConfig.scheduler_cls": "", "VllmConfig": "",
        "VllmConfig.aux_output_config": "", "VllmConfig.lora_config": "", "VllmConfig.model_config": "",
        "VllmConfig.parallel_config": "", "VllmConfig.scheduler_config": "", "VllmConfig.use_v2_model_runner": "",
        "set_current_vllm_config": "vllm_config /",
    },
    "vllm.engine.arg_utils": {
        "AsyncEngineArgs": "/ model, served_model_name, dtype, seed, hf_overrides, max_model_len, max_num_seqs, "
        "kv_cache_memory_bytes, block_size, gpu_memory_utilization, enforce_eager, tensor_parallel_size, "
        "data_parallel_size, distributed_executor_backend, disable_log_stats, use_tqdm_on_load, enable_prefix_caching, "
        "scheduling_policy, logprobs_mode, generation_config, worker_extension_cls, max_num_active_seqs, "
        "max_num_batched_tokens, scheduler_cls, reasoning_parser, nnodes, node_rank, master_addr, master_port, "
        "quantization, kv_cache_dtype, enable_return_routed_experts",
        "AsyncEngineArgs.create_engine_config": "/ headless",
        "AsyncEngineArgs.enable_lora": "", "AsyncEngineArgs.max_lora_rank": "", "AsyncEngineArgs.max_loras": "",
        "AsyncEngineArgs.create_model_config": "",
    },
    "vllm.entrypoints.cli.serve": {"make_arg_parser": "parser /"},  # the defining module was renamed in 0.33
    "vllm.entrypoints.common.cli_args or vllm.entrypoints.launchers.cli_args": {
        "FrontendArgs.api_key": "", "FrontendArgs.disable_uvicorn_access_log": "",
    },
    "vllm.entrypoints.launchers.api_server.app_state": {
        "init_app_state": "engine_client, state, args, supported_tasks /",
    },
    "vllm.entrypoints.launchers.app": {"build_app": "args, supported_tasks, model_config /"},
    "vllm.entrypoints.openai.models.serving": {"OpenAIServingModels.show_available_models": ""},
    "vllm.exceptions": {"VLLMClientError": "", "VLLMValidationError": "message /"},
    "vllm.logprobs": {"FlatLogprobs.logprobs": ""},
    "vllm.lora.request": {"LoRARequest": "lora_name, lora_int_id, lora_path /"},
    "vllm.model_executor.layers.quantization": {"register_quantization_config": "quantization /"},
    "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": "layer /"},
    "vllm.model_executor.model_loader.reload": {
        "finalize_layerwise_reload": "model, model_config /",
        "initialize_layerwise_reload": "model /",
    },
    "vllm.model_executor.models": {"supports_lora": "model /"},
    "vllm.outputs": {
        "CompletionOutput": "",
        "CompletionOutput.finish_reason": "", "CompletionOutput.index": "", "CompletionOutput.logprobs": "",
        "CompletionOutput.routed_experts": "", "CompletionOutput.token_ids": "", "CompletionOutput.weight_versions": "",
        "RequestOutput": "",
        "RequestOutput.num_cached_tokens": "", "RequestOutput.outputs": "", "RequestOutput.prompt_logprobs": "",
        "WeightVersionSpan.end": "", "WeightVersionSpan.start": "", "WeightVersionSpan.version": "",
    },
    "vllm.parser.parser_manager": {
        "ParserManager": "",
        "ParserManager.get_parser": "tool_parser_name, reasoning_parser_name / enable_auto_tools, tokenizer",
    },
    "vllm.platforms": {"current_platform": "", "Platform.is_cpu": ""},
    "vllm.reasoning": {"ReasoningParserManager": "", "ReasoningParserManager.list_registered": ""},
    "vllm.renderers.chat_utils": {"load_chat_template": "chat_template /"},
    "vllm.sampling_params": {
        "RequestOutputKind": "", "RequestOutputKind.DELTA": "", "RequestOutputKind.FINAL_ONLY": "",
        "SamplingParams": "", "SamplingParams.all_stop_token_ids": "", "SamplingParams.allowed_token_ids": "",
        "SamplingParams.bad_words_token_ids": "", "SamplingParams.logit_bias": "", "SamplingParams.min_tokens": "",
        "SamplingParams.routed_experts_prompt_start": "", "SamplingParams.stop": "",
        "SamplingParams.stream_interval": "",
    },
    "vllm.tasks": {"SupportedTask": ""},
    "vllm.tokenizers": {"get_tokenizer": "tokenizer_name /"},
    "vllm.tool_parsers": {"ToolParserManager": "", "ToolParserManager.list_registered": ""},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": "", "FlexibleArgumentParser.parse_args": ""},
    "vllm.v1.engine.async_llm": {
        "AsyncLLM": "/ log_stats, stat_loggers",
        "AsyncLLM.errored": "", "AsyncLLM.from_engine_args": "engine_args /",
        "AsyncLLM.generate": "prompt, sampling_params, request_id / lora_request, priority, data_parallel_rank",
        "AsyncLLM.get_supported_tasks": "", "AsyncLLM.model_config": "",
        "AsyncLLM.pause_generation": "/ mode, clear_cache",
        "AsyncLLM.resume_generation": "", "AsyncLLM.shutdown": "/ timeout",
        "AsyncLLM.update_weight_version": "new_version /",
        "AsyncLLM.vllm_config": "",
    },
    "vllm.v1.engine.exceptions": {"EngineDeadError": "", "EngineGenerateError": ""},
    "vllm.v1.metrics.loggers": {
        "StatLoggerBase": "vllm_config, engine_index /", "StatLoggerBase.log_engine_initialized": "",
        "StatLoggerBase.record": "",
    },
    "vllm.envs": {
        "VLLM_API_KEY": "", "VLLM_CONFIGURE_LOGGING": "", "VLLM_CPU_OMP_THREADS_BIND": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "",
        "VLLM_ENGINE_READY_TIMEOUT_S": "", "VLLM_HOST_IP": "", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "",
        "VLLM_LOGGING_LEVEL": "",
        "VLLM_NO_USAGE_STATS": "",
        "VLLM_RPC_BASE_PATH": "",
    },
}  # fmt: skip

PRIVATE: tuple[Private, ...] = (
    Private(
        "vLLM has no public way to send several tokens of a request out of the engine's process at once, which "
        "costs a tenth less",
        {
            "vllm.v1.engine": {
                "EngineCoreOutput": "request_id, new_token_ids /",
                "EngineCoreOutput.new_logprobs": "",
                "EngineCoreOutputs": "/ outputs",
            },
            "vllm.v1.engine.core": {
                "EngineCore": "", "EngineCore._attach_weight_version": "outputs /",
                "EngineCore.set_weight_version": "weight_version /",
                "EngineCore.scheduler": "", "EngineCoreProc.output_queue": "",
            },
            "vllm.v1.core.sched.scheduler": {"Scheduler.requests": ""},
            "vllm.v1.outputs": {
                "LogprobsLists": "logprob_token_ids, logprobs, sampled_token_ranks, cu_num_generated_tokens /",
            },
            "vllm.v1.request": {"Request.client_index": "", "Request.sampling_params": ""},
        },
    ),
    Private(
        "vLLM sends its engine some requests of which it dies, and the OpenAI application has no hook to check them",
        {
            "vllm.v1.engine": {
                "EngineCoreRequest": "", "EngineCoreRequest.mm_features": "", "EngineCoreRequest.prompt_token_ids": "",
                "EngineCoreRequest.sampling_params": "",
            },
            "vllm.v1.engine.async_llm": {"AsyncLLM.input_processor": ""},
            "vllm.v1.engine.input_processor": {"InputProcessor": "", "InputProcessor.process_inputs": ""},
        },
    ),
    Private(
        "the public collective_rpc calls the workers of the first replica only, pause_generation sleeps 20 ms in each "
        "weight sync, and a turn goes to the replica that has its prefix",
        {
            "vllm.v1.engine.async_llm": {"AsyncLLM.engine_core": ""},
            "vllm.v1.engine.core": {"EngineCore.collective_rpc": "method, timeout, args, kwargs /"},
            "vllm.v1.engine.core_client": {
                "AsyncMPClient.call_utility_all_async": "method /",
                "AsyncMPClient.pause_scheduler_async": "/ mode, clear_cache",
                "DPLBAsyncMPClient.core_engines": "",
                "DPLBAsyncMPClient.engine_inflight": "",
            },
        },
    ),
    Private(
        "vLLM cannot reserve slots for some requests: a /v1 request would wait until no group waits",
        {
            "vllm.v1.core.sched.request_queue": {
                "PriorityRequestQueue": "",
                "PriorityRequestQueue.__bool__": "", "PriorityRequestQueue.__iter__": "",
                "PriorityRequestQueue.__len__": "",
                "PriorityRequestQueue.add_request": "request /", "PriorityRequestQueue.peek_request": "",
                "PriorityRequestQueue.pop_request": "",
                "PriorityRequestQueue.prepend_request": "request /",
                "PriorityRequestQueue.prepend_requests": "requests /",
                "PriorityRequestQueue.remove_request": "request /",
                "PriorityRequestQueue.remove_requests": "requests /",
            },
            "vllm.v1.core.sched.scheduler": {
                "Scheduler.max_num_active_reqs": "", "Scheduler.running": "", "Scheduler.waiting": "",
            },
            "vllm.v1.request": {
                "Request": "", "Request.priority": "", "Request.status": "", "RequestStatus.RUNNING": "",
            },
        },
    ),
    Private(
        "counting an engine's steps needs a stat logger, for which vLLM would keep statistics of each token; and the "
        "requests of a dead engine must be notified of its death before the next one starts",
        {
            "vllm.v1.engine.async_llm": {
                "AsyncLLM._run_output_handler": "", "AsyncLLM.log_stats": "", "AsyncLLM.output_handler": "",
                "AsyncLLM.output_processor": "",
            },
            "vllm.v1.engine.output_processor": {"OutputProcessor.log_stats": ""},
        },
    ),
    Private(
        "vLLM's command for the other nodes of an engine parses its own flags and ends only with its workers",
        {
            "vllm.v1.executor.multiproc_executor": {
                "MultiprocExecutor": "vllm_config / monitor_workers",
                "MultiprocExecutor.start_worker_monitor": "/ inline",
            },
        },
    ),
    Private(
        "vLLM starts the replicas on the same cores, and its coordinator outlives a server that was killed",
        {
            "vllm.v1.engine.coordinator": {"DPCoordinatorProc": "", "DPCoordinatorProc.run_coordinator": ""},
            "vllm.v1.engine.core": {"EngineCoreProc": "", "EngineCoreProc.run_engine_core": "/ dp_rank"},
        },
    ),
    Private(
        "vLLM's own weight update is silently wrong on a CPU for tied heads and experts, does not detect "
        "missing parameters, and loads only while generation is paused",
        {
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": {
                "UnquantizedFusedMoEMethod": "", "UnquantizedFusedMoEMethod.moe_kernel": "",
            },
            "vllm.model_executor.layers.linear": {"UnquantizedLinearMethod": ""},
            "vllm.model_executor.layers.quantization.base_config": {
                "QuantizeMethodBase": "", "QuantizeMethodBase.process_weights_after_loading": "layer /",
            },
            "vllm.model_executor.layers.vocab_parallel_embedding": {
                "ParallelLMHead": "", "UnquantizedEmbeddingMethod": "",
            },
            "vllm.model_executor.model_loader.reload.layerwise": {
                "get_layerwise_info": "layer /", "initialize_online_processing": "layer /",
            },
            "vllm.model_executor.model_loader.reload.meta": {
                "SKIP_LOAD_TENSORS": "", "materialize_meta_tensor": "meta_tensor /", "to_meta_tensor": "tensor /",
            },
            "vllm.model_executor.model_loader.reload.sanitize": {"restore_layer_refs": "tensor, layer /"},
            "vllm.model_executor.model_loader.reload.types": {
                "LayerReloadingInfo.can_load": "", "LayerReloadingInfo.load_numel": "",
                "LayerReloadingInfo.load_numel_total": "",
                "LayerReloadingInfo.restore_metadata": "",
            },
            "vllm.model_executor.models.interfaces": {"SupportsMultiModal._tower_model_names": ""},
            "vllm.v1.worker.gpu_worker": {
                "Worker.device": "", "Worker.model_runner": "", "Worker.rank": "", "Worker.vllm_config": "",
            },
            "vllm.v1.worker.gpu.model_runner": {
                "GPUModelRunner.get_model": "", "GPUModelRunner.reset_lora_state": "",
            },
            "vllm.v1.worker.gpu_model_runner": {
                "GPUModelRunner.get_model": "", "GPUModelRunner.reset_lora_state": "",
            },
        },
    ),
    Private(
        "vLLM's int8 quantization leaves linear layers unquantized",
        {
            "vllm.model_executor.layers.linear": {
                "LinearBase": "", "LinearMethodBase": "", "LinearMethodBase.apply": "layer, x, bias /",
                "LinearMethodBase.create_weights": "layer, input_size_per_partition, output_partition_sizes, "
                "input_size, output_size, params_dtype /",
            },
            "vllm.model_executor.layers.quantization.base_config": {
                "QuantizationConfig": "", "QuantizationConfig.from_config": "config /",
                "QuantizationConfig.get_config_filenames": "", "QuantizationConfig.get_min_capability": "",
                "QuantizationConfig.get_name": "", "QuantizationConfig.get_quant_method": "layer, prefix /",
                "QuantizationConfig.get_supported_act_dtypes": "",
                "QuantizeMethodBase.uses_meta_device": "",
            },
            "vllm.model_executor.parameter": {"ModelWeightParameter": "/ data, input_dim, output_dim, weight_loader"},
        },
    ),
    Private(
        "vLLM loads adapters only from files, and would also wrap the LM head for them",
        {
            "vllm.config.lora": {"LoRAConfig.lora_dtype": "", "LoRAConfig.max_lora_rank": "", "MaxLoRARanks": ""},
            "vllm.lora.layers": {"BaseLayerWithLoRA": ""},
            "vllm.lora.lora_model": {
                "LoRAModel": "",
                "LoRAModel.from_lora_tensors": "lora_model_id, tensors, peft_helper, device, dtype / weights_mapper",
            },
            "vllm.lora.model_manager": {
                "LoRAModelManager": "", "LoRAModelManager.activate_adapter": "lora_id /",
                "LoRAModelManager.add_adapter": "adapter /",
                "LoRAModelManager.modules": "", "LoRAModelManager.packed_modules": "",
                "LoRAModelManager.remove_adapter": "adapter_id /",
                "get_supported_lora_modules": "",
            },
            "vllm.lora.peft_helper": {"PEFTHelper": "/ r, lora_alpha, target_modules"},
            "vllm.lora.utils": {"replace_submodule": "model, module_name, new_module /"},
            "vllm.lora.worker_manager": {
                "WorkerLoRAManager._adapter_manager": "", "WorkerLoRAManager.add_dummy_lora": "lora_request / rank",
                "WorkerLoRAManager.remove_all_adapters": "",
            },
            "vllm.model_executor.layers.linear": {"LinearBase": ""},
            "vllm.model_executor.models.registry": {
                "_ModelRegistry.resolve_model_cls": "architectures, model_config /"
            },
            "vllm.model_executor.models.utils": {"WeightsMapper.get_rename_mapper": ""},
            "vllm.v1.worker.lora_model_runner_mixin": {"LoRAModelRunnerMixin.lora_manager": ""},
        },
    ),
    Private(
        "on a CPU, a seeded request with a chunked prefill kills vLLM's engine",
        {
            "vllm.v1.utils": {"CpuGpuBuffer.np": ""},
            "vllm.v1.worker.cpu_model_runner": {
                "CPUModelRunner": "", "CPUModelRunner.discard_request_mask": "", "CPUModelRunner.input_batch": "",
                "CPUModelRunner.sample_tokens": "grammar_output /",
            },
            "vllm.v1.worker.gpu_input_batch": {"InputBatch.generators": "", "InputBatch.num_reqs": ""},
        },
    ),
    Private(
        "vLLM returns routed experts on GPUs only; its model runner for CPUs does not call its connector",
        {
            "vllm.config": {"VllmConfig._verify_aux_output_compatibility": ""},
            "vllm.config.aux_output": {
                "AuxOutputConfig.enable_return_routed_experts": "", "AuxOutputConfig.enabled": "",
            },
            "vllm.distributed.aux_output_connector.worker": {
                "AuxOutputWorkerConnector.begin_step": "metadata /",
                "AuxOutputWorkerConnector.prepare_output": "input_batch /",
                "PendingAuxOutput.enqueue_cpu_copy": "num_sampled, num_rejected /",
                "PendingAuxOutput.process_output": "",
                "get_aux_output_connector": "model, vllm_config, kv_cache_config /",
            },
            "vllm.v1.core.sched.output": {"SchedulerOutput.aux_output_connector_metadata": ""},
            "vllm.v1.outputs": {
                "ModelRunnerOutput.aux_output_connector_output": "", "ModelRunnerOutput.sampled_token_ids": "",
            },
            "vllm.v1.worker.cpu_model_runner": {
                "CPUModelRunner.execute_model": "scheduler_output /",
                "CPUModelRunner.initialize_kv_cache": "kv_cache_config /",
            },
            "vllm.v1.worker.gpu_input_batch": {
                "InputBatch.num_computed_tokens_cpu": "", "InputBatch.req_ids": "",
            },
            "vllm.v1.worker.gpu_model_runner": {
                "GPUModelRunner.execute_model_state": "", "GPUModelRunner.query_start_loc": "",
            },
        },
    ),
    Private(
        "prompts arrive as checked token ids, and vLLM's renderer would check each again; vLLM looks up environment "
        "variables for each token",
        {
            "vllm.envs": {"disable_envs_cache": "", "enable_envs_cache": ""},
            "vllm.inputs.engine": {"tokens_input": "prompt_token_ids / cache_salt"},
        },
    ),
    Private(
        "the server's own metrics must be in the registry that vLLM's /metrics shows",
        {"vllm.v1.metrics.prometheus": {"get_prometheus_registry": ""}},
    ),
)  # fmt: skip


def all_names() -> Iterator[tuple[str, str, str]]:
    """Yield module, name and parameters of each entry."""
    for names in (PUBLIC, *(group.names for group in PRIVATE)):
        for module, of_module in names.items():
            for name, parameters in of_module.items():
                yield module, name, parameters
