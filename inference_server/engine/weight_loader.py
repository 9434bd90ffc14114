"""Load one push into the model that vLLM computes with, on GPUs and on CPUs.

    load, bucket by bucket ─▶ finish: has everything arrived? ─▶ vLLM's processing of what was loaded
    CPU without receive_overlap: pause ─▶ begin_reload ─▶ buckets, layer by layer ─▶ pack_heads
    CPU with receive_overlap:    buckets ─▶ NextWeights, while the model generates ─▶ pause ─▶ take_over

vLLM's layerwise reload puts a layer on the meta device, keeps what its weight_loaders receive and rebuilds the layer once it is
complete. That suits layers whose weights are changed after loading: packed, shuffled, quantized. All others are loaded in place, because
some models write into those without a weight_loader (gpt-oss its sinks), and writes to the meta device are lost. On a CPU vLLM packs
every matrix again at each load, which takes longer than the transfer.

Invariants: nothing is generated between the first `load` and the end of `finish`. Until `take_over` nothing that the model
generates with has changed; afterwards everything has.
"""

import copy
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from inference_server.engine.heap import trim
from protocol.errors import PushIncomplete
from protocol.weights.dense import Arrived

Layer = Any
"""A module of vLLM's: what they have beside their tensors, torch's type knows nothing of."""
PACKED = "cpu_linear"
"""The attribute in which vLLM keeps the product with a layer's packed matrix, and so the matrix."""


def begin_reload(model: Layer) -> None:
    """Before a reload: let go of what vLLM has packed and would either hold a second time or not pack again."""
    for embedding in _embeddings(model):
        embedding.__dict__.pop(PACKED, None)
    for module in model.modules():
        # Experts are packed when their kernel is made, and it is made when there is none.
        if _method(module) is UnquantizedFusedMoEMethod:
            module.quant_method.moe_kernel = None


def pack_heads(model: Layer) -> None:
    """Pack the embeddings that logits are computed with, which vLLM's reload misses where one is tied to another."""
    embeddings = _embeddings(model)
    # Some models have no layer for it and compute logits with the embedding itself.
    for head in [embedding for embedding in embeddings if isinstance(embedding, ParallelLMHead)] or embeddings:
        head.quant_method.process_weights_after_loading(head)


def _embeddings(model: Layer) -> list[Layer]:
    return [module for module in model.modules() if _method(module) is UnquantizedEmbeddingMethod]


def _method(module: Layer) -> type:
    return type(getattr(module, "quant_method", None))


class NextWeights:
    """One push's weights for a model, in a copy of its modules that has tensors of its own."""

    @staticmethod
    def can_be_made(model: Layer) -> bool:
        """Only of matrices and embeddings that are not quantized: what vLLM makes of others is not known here."""
        known = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
        return {_method(module) for module in model.modules()} <= known

    def __init__(self, model: Layer, config: ModelConfig) -> None:
        self._config = config
        self._copies: dict[Layer, Layer] = {}
        """By the module of the model that it is a copy of."""
        self._copy = self._copy_of(model, {})
        for matrix in self._matrices().values():
            initialize_online_processing(matrix)
        self._missing = {name for name, _ in self._copy.named_parameters()}
        self.load_s = 0.0

    def take(self, arriving: Iterator[Arrived]) -> None:
        """Load every bucket as it comes; each matrix is packed once it is whole. Raises PushIncomplete if some have not come."""
        trim()  # the weights before the last are free, but not all of it would be used again here
        for arrived in arriving:
            started = time.monotonic()
            self._missing -= self._copy.load_weights(iter(arrived.bucket.views(arrived.buffer)))
            del arrived  # or its memory would not be free for the next bucket
            self.load_s += time.monotonic() - started
        started = time.monotonic()
        self._missing |= {name for name, matrix in self._matrices().items() if not hasattr(matrix, PACKED)}
        if self._missing:
            raise PushIncomplete.lacking(sorted(self._missing))
        pack_heads(self._copy)
        self.load_s += time.monotonic() - started

    def take_over(self) -> None:
        """Let the model compute with what was loaded. Nothing may be generated meanwhile; of no use afterwards."""
        started = time.monotonic()
        for module, mine in self._copies.items():
            for name, parameter in mine._parameters.items():
                if parameter is not None:
                    module._parameters[name].data = parameter.data
            if hasattr(mine, PACKED):
                setattr(module, PACKED, getattr(mine, PACKED))
            mine.__dict__.clear()  # they refer to each other in circles, and would be kept until Python looks for such
        for module in self._copies:
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(self._config.dtype)
        self.load_s += time.monotonic() - started

    def _matrices(self) -> dict[str, Layer]:
        modules = self._copy.named_modules()
        return {name: module for name, module in modules if _method(module) is UnquantizedLinearMethod}

    def _copy_of(self, module: Layer, tensors: dict[int, torch.Tensor]) -> Layer:
        """Copy the tree below a module; `tensors` are the copies by the ids of the originals, for some are shared."""
        if module in self._copies:
            return self._copies[module]
        mine: Layer = copy.copy(module)
        self._copies[module] = mine
        mine.__dict__.pop(PACKED, None)
        mine._buffers = {}  # no push has any
        children, parameters = module._modules.items(), module._parameters.items()
        mine._modules = {name: None if child is None else self._copy_of(child, tensors) for name, child in children}
        # A packed matrix is no parameter any more; vLLM remembers what it was, and makes it again once all of it has come.
        is_matrix = _method(module) is UnquantizedLinearMethod
        matrix = get_layerwise_info(module).restore_metadata[0] if is_matrix else {}
        for name, parameter in parameters:
            if name in matrix:
                tensors[id(parameter)] = restore_layer_refs(to_meta_tensor(matrix[name]), mine)
            elif parameter is not None and id(parameter) not in tensors:
                tensors[id(parameter)] = materialize_meta_tensor(parameter)
        mine._parameters = {name: tensors.get(id(parameter)) for name, parameter in parameters}
        return mine


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
