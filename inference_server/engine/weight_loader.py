"""Loading of one weight sync into vLLM's model, on GPUs and on CPUs.

    load, bucket by bucket ─▶ finish: complete? ─▶ vLLM's processing after loading
    CPU without overlap_weight_loading: pause ─▶ begin_reload ─▶ buckets, layer by layer ─▶ pack_heads
    CPU with overlap_weight_loading:    buckets ─▶ NextWeights, during generation ─▶ pause ─▶ swap_in

vLLM's layerwise reload moves a layer to the meta device and rebuilds it once complete. Layers that change
after loading (packed, shuffled, quantized) need that. All others load in place: some models write without a
weight_loader (gpt-oss its sinks), and writes to the meta device are lost. On a CPU, vLLM packs every matrix
again at each load, which takes longer than the transfer.
Invariant: no generation from the first `Reload.load` to the end of `finish`. `NextWeights` leaves the model
unchanged until `swap_in`.
"""

import copy
import time
from collections.abc import Collection, Iterable, Iterator
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

from inference_server.engine.memory import trim
from protocol.errors import PushIncomplete
from protocol.weights.dense import ReceivedBucket

Layer = Any
"""Module of vLLM. torch's type does not know the attributes that vLLM adds."""
PACKED = "cpu_linear"
"""Attribute in which vLLM keeps the product with a packed matrix, and thereby the matrix."""


def begin_reload(model: Layer) -> None:
    """Release what vLLM has packed before a reload.

    vLLM would otherwise hold it a second time, or not pack it again.
    """
    for embedding in _embeddings(model):
        embedding.__dict__.pop(PACKED, None)
    for module in model.modules():
        # vLLM packs experts when it creates their kernel, which it does only if there is none.
        if _method(module) is UnquantizedFusedMoEMethod:
            module.quant_method.moe_kernel = None


def pack_heads(model: Layer) -> None:
    """Pack the embeddings that compute logits.

    vLLM's reload misses them if one is tied to another.
    """
    embeddings = _embeddings(model)
    # Some models have no separate head and compute logits with the embedding itself.
    for head in [embedding for embedding in embeddings if isinstance(embedding, ParallelLMHead)] or embeddings:
        head.quant_method.process_weights_after_loading(head)


def _embeddings(model: Layer) -> list[Layer]:
    return [module for module in model.modules() if _method(module) is UnquantizedEmbeddingMethod]


def _method(module: Layer) -> type:
    return type(getattr(module, "quant_method", None))


def copies(arrived: ReceivedBucket, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return copies of these tensors of a bucket, whose memory is used again."""
    return {name: tensor.clone() for name, tensor in arrived.bucket.views(arrived.buffer) if name in names}


class NextWeights:
    """Weights of one sync, in a copy of the model's modules with its own tensors."""

    @staticmethod
    def can_be_made(model: Layer) -> bool:
        """Return True if vLLM processes only unquantized linear and embedding layers.

        This code does not know how vLLM processes others, such as experts.
        """
        known = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
        return {_method(module) for module in model.modules()} <= known

    def __init__(self, model: Layer, config: ModelConfig, adapter_names: Collection[str] = ()) -> None:
        """Prepare the copy. Tensors with `adapter_names` are not of the model, and are kept in `adapter`."""
        self._config, self._adapter_names = config, adapter_names
        self.adapter: dict[str, torch.Tensor] = {}
        self._copies: dict[Layer, Layer] = {}
        """Copies by their original module."""
        self._copy = self._copy_of(model, {})
        for matrix in self._matrices().values():
            initialize_online_processing(matrix)
        self._missing = {name for name, _ in self._copy.named_parameters()}
        self.load_s = 0.0

    def receive(self, arriving: Iterator[ReceivedBucket]) -> None:
        """Load every bucket as it arrives, and pack each matrix once it is complete.

        Raises:
            PushIncomplete: Parameters are missing.
        """
        # The weights before the last ones are free, but this load would not reuse all of their memory.
        trim()
        for arrived in arriving:
            started = time.monotonic()
            self.adapter |= copies(arrived, self._adapter_names)
            views = arrived.bucket.views(arrived.buffer)
            self._missing -= self._copy.load_weights(iter(one for one in views if one[0] not in self._adapter_names))
            del arrived, views  # Otherwise its memory is not free for the next bucket.
            self.load_s += time.monotonic() - started
        started = time.monotonic()
        self._missing |= {name for name, matrix in self._matrices().items() if not hasattr(matrix, PACKED)}
        if self._missing:
            raise PushIncomplete.missing(sorted(self._missing))
        pack_heads(self._copy)
        self.load_s += time.monotonic() - started

    def swap_in(self) -> None:
        """Make the model compute with the loaded weights.

        Nothing may be generated meanwhile. This object is unusable afterwards.
        """
        started = time.monotonic()
        for module, mine in self._copies.items():
            for name, parameter in mine._parameters.items():
                if parameter is not None:
                    module._parameters[name].data = parameter.data
            if hasattr(mine, PACKED):
                setattr(module, PACKED, getattr(mine, PACKED))
            # The copies refer to each other in cycles, and would stay until the next garbage collection.
            mine.__dict__.clear()
        for module in self._copies:
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(self._config.dtype)
        self.load_s += time.monotonic() - started

    def _matrices(self) -> dict[str, Layer]:
        modules = self._copy.named_modules()
        return {name: module for name, module in modules if _method(module) is UnquantizedLinearMethod}

    def _copy_of(self, module: Layer, tensors: dict[int, torch.Tensor]) -> Layer:
        """Copy the tree below a module.

        `tensors` maps the ids of the originals to their copies, because some tensors are shared.
        """
        if module in self._copies:
            return self._copies[module]
        mine: Layer = copy.copy(module)
        self._copies[module] = mine
        mine.__dict__.pop(PACKED, None)
        mine._buffers = {}  # No sync contains buffers.
        children, parameters = module._modules.items(), module._parameters.items()
        mine._modules = {name: None if child is None else self._copy_of(child, tensors) for name, child in children}
        # A packed matrix is no longer a parameter. vLLM keeps its metadata, and packs it again once it is
        # complete.
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
    """Reload of a model from the buckets of one sync, used once."""

    def __init__(self, model: nn.Module, config: ModelConfig, device: torch.device) -> None:
        self._model, self._config, self._device = model, config, device
        self._has_started = False
        self._loaded: set[str] | None = set()
        """Loaded names in vLLM's model. None if the model does not report them."""
        self._reloaded: set[nn.Module] = set()
        """Layers that are rebuilt."""
        self._aliases: dict[int, set[str]] = {}
        """Names of each parameter. A sync contains only one of several tied names."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), set()).add(name)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load one bucket.

        Layers that are rebuilt keep its tensors until all of their tensors have arrived.
        """
        self._start()
        on_device = ((name, tensor.to(self._device)) for name, tensor in tensors)
        names = self._model.load_weights(_expert_by_expert(self._model, on_device))  # type: ignore[operator]
        self._loaded = None if names is None or self._loaded is None else self._loaded | names

    def finish(self) -> None:
        """Compute with the loaded weights from now on.

        Raises:
            PushIncomplete: Parameters are missing. Nothing more has been changed.
        """
        self._start()
        if missing := self._missing():
            raise PushIncomplete.missing(missing)
        put_back(self._model, self._config)
        if self._device.type == "cpu":
            pack_heads(self._model)

    def _start(self) -> None:
        if self._has_started:
            return
        self._has_started = True
        if self._device.type == "cpu":
            begin_reload(self._model)
        for root in [layer for layer in self._model.modules() if _is_changed_after_loading(layer)]:
            initialize_layerwise_reload(root)
            self._reloaded.update(root.modules())

    def _missing(self) -> list[str]:
        """Return the parameters that are incomplete.

        A tower (vision, audio) of which nothing has arrived is not counted.
        """
        loaded = self._with_ties()
        towers = tuple(f"{tower}." for tower in getattr(self._model, "_tower_model_names", ()))
        absent_towers = tuple(tower for tower in towers if not any(name.startswith(tower) for name in loaded))
        missing = []
        for prefix, layer in self._model.named_modules():
            if is_deferred_attention_layer(layer) or f"{prefix}.".startswith(absent_towers):
                # An attention layer itself has only the scales of its cache, which a policy does not have.
                continue
            missing += self._missing_in(layer, prefix, loaded)
        return missing

    def _missing_in(self, layer: nn.Module, prefix: str, loaded: set[str]) -> list[str]:
        names = {f"{prefix}.{name}".lstrip("."): name for name, one in layer._parameters.items() if one is not None}
        if layer not in self._reloaded:
            return [] if self._loaded is None else [name for name in names if name not in loaded]
        info = get_layerwise_info(layer)
        # Count elements: a fused parameter (q, k and v; all experts) is reported as loaded after its first
        # part.
        is_tied = loaded - (self._loaded or set()) >= names.keys() > set()
        if info.can_load() and info.load_numel < (info.load_numel_total or 0) and not is_tied:
            return [f"{prefix} ({info.load_numel} of {info.load_numel_total} elements received)"]
        return [name for name, own in names.items() if own in SKIP_LOAD_TENSORS and name not in loaded]

    def _with_ties(self) -> set[str]:
        loaded = self._loaded or set()
        return {alias for names in self._aliases.values() if loaded & names for alias in names}


def put_back(model: nn.Module, config: ModelConfig) -> None:
    """End a reload. Layers that received nothing get their old tensors back."""
    finalize_layerwise_reload(model, config)


def _is_changed_after_loading(layer: nn.Module) -> bool:
    method = getattr(layer, "quant_method", None)
    is_changed = isinstance(method, QuantizeMethodBase) and not isinstance(method, UnquantizedEmbeddingMethod)
    return is_changed or is_deferred_attention_layer(layer)


def _expert_by_expert(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split the experts of gpt-oss.

    vLLM passes them to a weight_loader only one by one.
    """
    is_gpt_oss = type(model).__name__ == "GptOssForCausalLM"
    for name, tensor in tensors:
        stem, _, kind = name.rpartition(".experts.")
        if is_gpt_oss and kind in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            yield from ((f"{stem}.experts.{index}.{kind}", expert) for index, expert in enumerate(tensor))
        else:
            yield name, tensor
