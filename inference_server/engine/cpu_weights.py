"""What the weights of a push need where vLLM computes on a CPU.

    without receive_overlap: pause ─▶ begin_reload ─▶ buckets, layer by layer ─▶ pack_heads
    with receive_overlap:    buckets ─▶ NextWeights, while the model generates ─▶ pause ─▶ take_over

There vLLM packs every matrix anew at each loading, which takes longer than the transfer. Invariant of NextWeights: until
`take_over` nothing has changed that the model generates with, and then everything has.
"""

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
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
