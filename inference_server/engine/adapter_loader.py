"""Loading of the policy's LoRA adapter into vLLM, in every worker.

    start, full weights ─▶ clear: an adapter of zeros ─▶ prepare, replace (each sync of an adapter)

Invariant: vLLM always has the adapter. Without it, vLLM would look for its files at the next request, and die.
An adapter that vLLM cannot apply completely is refused before anything changes.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import replace_submodule
from vllm.model_executor.layers.linear import LinearBase

from inference_server.engine.adapter import ADAPTER
from protocol.errors import PushIncomplete


def adapt_linear_layers_only() -> None:
    """Patch vLLM in this process to prepare only linear layers for adapters.

    vLLM would also wrap embeddings, the LM head and experts. The head would then compute with an adapter for
    each token, and prompt logprobs with that of other tokens.
    """

    def linear_layers(model: nn.Module) -> list[str]:
        names = (name for name, module in model.named_modules() if isinstance(module, LinearBase))
        return sorted({name.rpartition(".")[2] for name in names})

    manager_module: Any = inspect.getmodule(LoRAModelManager)
    manager_module.get_supported_lora_modules = linear_layers


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Take vLLM's adapter layers out of the model meanwhile.

    The model then has the parameter names that its checkpoint loads into.
    """
    named = list(model.named_modules(remove_duplicate=False))
    wrappers = [(name, module) for name, module in named if isinstance(module, BaseLayerWithLoRA)]
    for name, wrapper in wrappers:
        replace_submodule(model, name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers:
            replace_submodule(model, name, wrapper)


def clear(lora_manager: Any) -> None:
    """Replace the adapter by one of zeros."""
    lora_manager.remove_all_adapters()
    lora_manager.add_dummy_lora(ADAPTER, rank=1)


def prepare(lora_manager: Any, tensors: Mapping[str, torch.Tensor], rank: int) -> LoRAModel:
    """Return vLLM's form of an adapter, without applying it.

    Raises:
        PushIncomplete: vLLM cannot apply the adapter to this model.
    """
    adapters = lora_manager._adapter_manager
    mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER.lora_int_id,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # B contains the scale
        device=str(adapters.device),
        dtype=adapters.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    parts = {part for name in adapters.modules for part in adapters.packed_modules.get(name, [name])}
    if unknown := sorted(adapter.loras.keys() - parts):
        raise PushIncomplete(
            f"vLLM cannot apply the adapter to {', '.join(unknown[:5])} of this model. Set learner.weight_sync.lora = "
            '"merged", or remove these layers from learner.lora.target_modules'
        )
    return adapter


def replace(lora_manager: Any, adapter: LoRAModel) -> None:
    """Apply an adapter instead of the one before."""
    adapters = lora_manager._adapter_manager
    adapters.remove_adapter(adapter.id)
    adapters.add_adapter(adapter)
    adapters.activate_adapter(adapter.id)
