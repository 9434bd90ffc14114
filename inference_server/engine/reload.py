"""One push into the model that vLLM computes with.

    load, bucket by bucket ─▶ finish: has all of it come? ─▶ vLLM's processing of what it has loaded

vLLM's layerwise reload puts a layer on the meta device, keeps what its weight_loaders are given and makes the layer anew when all
of it has come. That is for layers whose weights are changed after loading: packed, shuffled, quantized. All others are loaded where
they lie, because some models write into those without a weight_loader (gpt-oss its sinks), and what is written to the meta device
is lost. Nothing may be generated between the first `load` and the end of `finish`.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from inference_server.engine.cpu_weights import begin_reload, pack_heads
from protocol.errors import PushIncomplete


class Reload:
    """Made before the first bucket of a push, of no use after the last."""

    def __init__(self, model: nn.Module, config: ModelConfig, device: torch.device) -> None:
        self._model, self._config, self._device = model, config, device
        self._has_begun = False
        self._came: set[str] | None = set()
        """Names in vLLM's model; None if the model does not tell."""
        self._reloaded: set[nn.Module] = set()
        """The layers that are made anew."""
        self._aliases: dict[int, set[str]] = {}
        """The names that each parameter has: of tied ones only one comes."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), set()).add(name)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take one bucket. Layers that are made anew keep its tensors until all of theirs have come."""
        self._begin()
        on_device = ((name, tensor.to(self._device)) for name, tensor in tensors)
        names = self._model.load_weights(_expert_by_expert(self._model, on_device))  # type: ignore[operator]
        self._came = None if names is None or self._came is None else self._came | names

    def finish(self) -> None:
        """Compute with what has come. Raises PushIncomplete, before anything more is changed."""
        self._begin()
        if missing := self._missing():
            raise PushIncomplete.lacking(missing)
        put_back(self._model, self._config)
        if self._device.type == "cpu":
            pack_heads(self._model)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if self._device.type == "cpu":
            begin_reload(self._model)
        for root in [layer for layer in self._model.modules() if _is_changed_after_loading(layer)]:
            initialize_layerwise_reload(root)
            self._reloaded.update(root.modules())

    def _missing(self) -> list[str]:
        """The parameters of which not all has come; but none of a tower (vision, audio) of which nothing has come."""
        came = self._with_ties()
        towers = tuple(f"{tower}." for tower in getattr(self._model, "_tower_model_names", ()))
        left_alone = tuple(tower for tower in towers if not any(name.startswith(tower) for name in came))
        missing = []
        for prefix, layer in self._model.named_modules():
            if is_deferred_attention_layer(layer) or f"{prefix}.".startswith(left_alone):
                continue  # an attention layer itself has only the scales of its cache, and a policy has none
            missing += self._missing_in(layer, prefix, came)
        return missing

    def _missing_in(self, layer: nn.Module, prefix: str, came: set[str]) -> list[str]:
        names = {f"{prefix}.{name}".lstrip("."): name for name, one in layer._parameters.items() if one is not None}
        if layer not in self._reloaded:
            return [] if self._came is None else [name for name in names if name not in came]
        info = get_layerwise_info(layer)
        # Elements, because a fused parameter (q, k and v; all experts) counts as loaded when one part of it has come.
        is_tied = came - (self._came or set()) >= names.keys() > set()
        if info.can_load() and info.load_numel < (info.load_numel_total or 0) and not is_tied:
            return [f"{prefix} ({info.load_numel} of {info.load_numel_total} elements came)"]
        return [name for name, own in names.items() if own in SKIP_LOAD_TENSORS and name not in came]

    def _with_ties(self) -> set[str]:
        came = self._came or set()
        return {alias for names in self._aliases.values() if came & names for alias in names}


def put_back(model: nn.Module, config: ModelConfig) -> None:
    """End a reload: layers of which nothing has come have what they had."""
    finalize_layerwise_reload(model, config)


def _is_changed_after_loading(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    is_changed = isinstance(method, QuantizeMethodBase) and not isinstance(method, UnquantizedEmbeddingMethod)
    return is_changed or is_deferred_attention_layer(layer)


def _expert_by_expert(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Cut gpt-oss's experts, which vLLM gives to a weight_loader only if they come one by one."""
    is_gpt_oss = type(model).__name__ == "GptOssForCausalLM"
    for name, tensor in tensors:
        stem, _, kind = name.rpartition(".experts.")
        if is_gpt_oss and kind in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            yield from ((f"{stem}.experts.{index}.{kind}", expert) for index, expert in enumerate(tensor))
        else:
            yield name, tensor
