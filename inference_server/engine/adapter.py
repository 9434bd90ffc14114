"""One LoRA adapter for all requests: the policy's, which weight syncs replace in place (adapter_loader.py).

    [server], learner.lora ─▶ with_adapters: vLLM starts with LoRA ─▶ ADAPTER in every request

The adapter keeps its name and id, so sequences in flight continue with the new one. vLLM's prefix cache knows
an adapter by its name only. The salt of the version keeps the versions apart (versioned_llm.py).
"""

import logging
from typing import get_args

from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import supports_lora

from inference_server.config import ServerRun

log = logging.getLogger(__name__)

ADAPTER = LoRARequest("policy", 1, "weight sync")
"""Adapter of all requests. vLLM reads no files, because its workers already have the adapter."""


def with_adapters(args: AsyncEngineArgs, run: ServerRun) -> AsyncEngineArgs:
    """Return the arguments with LoRA enabled, if the run has adapters and vLLM can apply them to this model."""
    rank = run.lora_rank
    if rank == 0:
        return args
    if (reason := _why_not(args, rank)) is not None:
        log.warning("weight syncs to this server send merged weights: %s (server.max_lora_rank = %d)", reason, rank)
        return args
    args.enable_lora, args.max_loras = True, 1
    args.max_lora_rank = min(size for size in get_args(MaxLoRARanks) if size >= rank)
    return args


def _why_not(args: AsyncEngineArgs, rank: int) -> str | None:
    if rank > max(get_args(MaxLoRARanks)):
        return f"vLLM supports adapters up to rank {max(get_args(MaxLoRARanks))}"
    config = args.create_model_config()
    if config.is_moe:
        return "the kernels of a mixture-of-experts model differ with adapters"
    model, architecture = config.registry.resolve_model_cls(config.architectures, config)
    return None if supports_lora(model) else f"vLLM supports no adapters for {architecture}"
