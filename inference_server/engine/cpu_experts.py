"""Routed experts on a CPU, whose model runner lacks vLLM's connector for them (vLLM 0.32).

    scheduler ── block hashes ─▶ begin_step ─▶ forward: routers fill the buffer ─▶ sample ─▶ rows ─▶ scheduler

vLLM's connector keeps the rows of the KV cache by block hash. Tokens whose KV cache is reused have the rows with
which it was computed. vLLM calls the connector from its model runner for GPUs only, so it refuses the switch on a CPU.
Invariant: only an eager forward fills the buffer. `vllm_args.py` refuses any other.
"""

from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.engine.arg_utils import AsyncEngineArgs


class ArgsWithExperts(AsyncEngineArgs):
    """Engine arguments that switch the routed experts on without vLLM's check of the platform."""

    def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig:
        config = super().create_engine_config(*args, **kwargs)
        # An attribute of the instance, because each process of the engine checks its copy.
        config._verify_aux_output_compatibility = accept
        config.aux_output_config.enable_return_routed_experts = True
        return config


def accept() -> None:
    """Stand in for vLLM's check. `vllm_args.py` has checked the model, and vLLM refuses the rest on a CPU anyway."""


def return_experts() -> None:
    """Patch vLLM's model runner in this process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    initialize_kv_cache, execute_model = CPUModelRunner.initialize_kv_cache, CPUModelRunner.execute_model
    sample_tokens = CPUModelRunner.sample_tokens

    @wraps(initialize_kv_cache)
    def initialize_with_connector(runner: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        initialize_kv_cache(runner, kv_cache_config, *args, **kwargs)
        runner.experts = None
        if runner.vllm_config.aux_output_config.enabled:
            runner.experts = get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)

    @wraps(execute_model)
    def begin_and_execute(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if runner.experts is not None:
            runner.experts.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(runner, scheduler_output, *args, **kwargs)

    @wraps(sample_tokens)
    def sample_with_experts(runner: Any, *args: Any) -> Any:
        if runner.experts is None or runner.execute_model_state is None:
            return sample_tokens(runner, *args)
        pending = runner.experts.prepare_output(_batch_of(runner))
        output = sample_tokens(runner, *args)
        if pending is not None:
            num_sampled = np.array([len(token_ids) for token_ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    CPUModelRunner.initialize_kv_cache = initialize_with_connector
    CPUModelRunner.execute_model, CPUModelRunner.sample_tokens = begin_and_execute, sample_with_experts


def _batch_of(runner: Any) -> SimpleNamespace:
    """Return what the connector reads of a step's batch, copied, because the step's end changes it."""
    num_requests = runner.input_batch.num_reqs
    return SimpleNamespace(
        req_ids=list(runner.input_batch.req_ids),
        query_start_loc_np=runner.query_start_loc.np[: num_requests + 1].copy(),
        num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[:num_requests].copy(),
    )
