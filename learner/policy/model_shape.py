"""The shape of a model: what its config tells about its memory and its arithmetic, before it is loaded.

    config.json ─▶ the model on the meta device ─▶ ModelShape ─▶ memory.py, and the metrics of throughput

Pure. What a layer keeps of a token is measured; docs/memory-formulas.md explains it.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D


class LayerBytes(NamedTuple):
    """Bytes that a layer keeps of each token for its backward pass, for each unit of its widths."""

    hidden: int
    attention: int
    """For each number in a query, and in a key with its value."""
    attention_norm: int
    """More for each of them, where queries and keys are normalized."""
    intermediate: int
    expert: int
    """For each hidden unit of the copy that an expert gets and returns."""


KEPT = {"float32": LayerBytes(28, 8, 8, 16, 8), "bfloat16": LayerBytes(18, 4, 6, 8, 4)}
"""Measured on Qwen2, Qwen3 and Llama, whose MLP is gated, and on the grouped experts of Qwen3-MoE."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a model that determine its memory."""

    num_parameters: int
    """Number of parameters, tied weights once."""
    num_active: int
    """Number of parameters that a token uses, without the experts that its router leaves out."""
    num_embedding: int
    """Number of parameters that are only looked up; tied weights: 0."""
    num_largest: int
    """Number of elements of the largest tensor."""
    num_layers: int
    hidden_size: int
    kept_per_token: dict[str, int]
    """Bytes that a layer keeps of a token for its backward pass, in each dtype."""
    vocab_size: int
    kv_size: int
    """Numbers in the keys of one token in one layer, as the mean over layers."""
    linear_layers: dict[str, int]
    """Inputs + outputs of each linear layer except the head.

    An adapter of rank r has r times as many parameters.
    """


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Return the shape of a model, which is built on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text, head = config.get_text_config(), model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    layers = list(text.per_layer_config) if text.is_heterogeneous else [text]
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return ModelShape(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_active=sum(parameter.numel() for parameter in model.parameters()) - _num_idle(model),
        num_embedding=0 if embedding is getattr(head, "weight", None) else embedding.numel(),
        num_largest=max(parameter.numel() for parameter in model.parameters()),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        kept_per_token={dtype: max(kept_per_token(layer, dtype, names) for layer in layers) for dtype in KEPT},
        vocab_size=text.vocab_size,
        kv_size=sum(map(_kv_size, layers)) // len(layers),
        linear_layers={name: sum(module.weight.shape) for name, module in linear.items() if module is not head},
    )


def _num_idle(model: nn.Module) -> int:
    """Return the number of parameters of experts that a token does not use.

    Experts and routers are found by their names in transformers.
    """
    num_idle = 0.0
    for block in model.modules():
        experts = block._modules.get("experts")
        chosen = (vars(module).get(key) for module in block.modules() for key in ("top_k", "num_experts_per_tok"))
        num_chosen = next((count for count in chosen if isinstance(count, int)), None)
        if experts is None or num_chosen is None:
            continue
        sizes = [parameter.numel() for parameter in experts.parameters()]
        num_experts = vars(experts).get("num_experts") or len(next(experts.parameters()))
        num_idle += sum(sizes) * (1 - num_chosen / num_experts)
    return round(num_idle)


def kept_per_token(text: Any, dtype: str, module_names: Collection[str]) -> int:
    """Return the bytes that a layer of this config keeps of a token for its backward pass."""
    kept, num_chosen = KEPT[dtype], int(getattr(text, "num_experts_per_tok", None) or 0)
    of_attention = kept.attention + (kept.attention_norm if "q_norm" in module_names else 0)
    return (
        kept.hidden * text.hidden_size
        + of_attention * (_query_size(text) + _kv_size(text))
        + kept.intermediate * _intermediate_size(text)
        + kept.expert * text.hidden_size * num_chosen
    )


def tokens_per_key(text: Any, dtype: str, *, is_checkpointed: bool) -> float:
    """Return how many tokens take the memory of one gathered key with its value.

    On a GPU, a packed pass gathers the keys of a prompt for each of its completions and keeps them for the
    backward pass, with gradient checkpointing those of one layer.
    """
    of_key, of_token = 2 * bytes_of(dtype) * _kv_size(text), kept_per_token(text, dtype, ())
    if is_checkpointed:
        of_token += bytes_of(dtype) * text.hidden_size * text.num_hidden_layers
    return of_key / of_token


def bytes_of(dtype: str) -> int:
    """Return the bytes of a number."""
    return 4 if dtype == "float32" else 2


def _kv_size(text: Any) -> int:
    num_heads: int = text.num_attention_heads
    return int((getattr(text, "num_key_value_heads", None) or num_heads) * _head_size(text))


def _query_size(text: Any) -> int:
    return int(text.num_attention_heads * _head_size(text))


def _head_size(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _intermediate_size(text: Any) -> int:
    """Return the number of intermediate units that a token goes through, over its experts."""
    if size := getattr(text, "moe_intermediate_size", None):
        shared = getattr(text, "shared_expert_intermediate_size", None) or size * (
            getattr(text, "n_shared_experts", None) or 0
        )
        return int(size * text.num_experts_per_tok + shared)
    for key in ("intermediate_size", "n_inner", "ffn_dim"):
        if isinstance(size := getattr(text, key, None), int):
            return size * int(getattr(text, "num_experts_per_tok", None) or 1)
    return 4 * int(text.hidden_size)
