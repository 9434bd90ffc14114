"""Estimate the memory that a model needs on both sides, from its shape and the config, before loading it.

Pure. Each part is a short formula that can be checked against tensors. docs/memory-formulas.md explains them.
Two things are not counted: CUDA's own memory of about 1 GB, and the allocator's loss between blocks.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from learner.config import LearnerConfig, LearnerRun
from learner.forward.lm_head import TILE_LOGITS
from protocol.weights.buckets import SPAN_BYTES
from protocol.weights.dense import NUM_BUFFERS

GIB = 1 << 30


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
BYTES_OF_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes of both moments of a parameter. 8-bit moments have a float32 scale for each block of 256."""
SERVER_BUCKETS = 3
LOADING = "weights while they are loaded"


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


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by purpose."""

    device: dict[str, int]
    """Bytes on each GPU of the side."""
    host: dict[str, int]
    """Bytes on the learner's first node, or in each server."""

    @property
    def device_gib(self) -> float:
        return sum(self.device.values()) / GIB

    @property
    def host_gib(self) -> float:
        """GiB of host memory. Weights are loaded before there is anything else."""
        later = {name: size for name, size in self.host.items() if name != LOADING}
        return max(self.host.get(LOADING, 0), sum(later.values())) / GIB


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


def num_trained(shape: ModelShape, config: LearnerConfig) -> int:
    """Return the number of parameters that have a gradient."""
    if not config.lora.rank:
        return shape.num_parameters
    ends = config.lora.target_modules
    adapted = [size for name, size in shape.linear_layers.items() if ends == "all-linear" or name.endswith(tuple(ends))]
    return config.lora.rank * sum(adapted)


def learner_memory(
    shape: ModelShape,
    run: LearnerRun,
    *,
    num_ranks: int = 1,
    num_shards: int = 1,
    ranks_per_node: int | None = None,
    device_type: str = "cuda",
) -> Memory:
    """Return the learner's memory: of each rank's GPU, and of the node of rank 0.

    `num_shards` is the number of ranks that divide the policy. `ranks_per_node`: None: all ranks. A key that is
    still "auto" counts as its fastest value. On a CPU, the first part is what would be on the GPU. Servers of
    `endpoints_from` count as one.
    """
    config, wire = run.learner, _bytes_of(run.dtype)
    trained, total = num_trained(shape, config), shape.num_parameters
    frozen = total if config.lora.rank else 0
    per_node = ranks_per_node or num_ranks
    is_sharded, is_offloaded = num_shards > 1, config.optimizer.offload is True and device_type != "cpu"
    moments = int(BYTES_OF_MOMENTS[config.optimizer.kind] * trained)
    snapshots = (4 if config.reference.kind == "ema" else wire) * trained * _num_snapshots(config)
    is_on_host = config.reference.device == "cpu"
    copy = wire * total if config.weight_sync.overlap_with_training else 0
    baselines = wire * total if config.weight_sync.compression == "delta" else 0
    activations, head = (
        activation_bytes(shape, run, device_type),
        head_bytes(shape, run, tile_logits=TILE_LOGITS[device_type]),
    )
    device = {
        "weights": (4 * trained + wire * frozen) // num_shards,
        "gradients": 4 * trained // num_shards,
        "optimizer": (8 * min(shape.num_largest, trained) if is_offloaded else moments) // num_shards,
        "reference": 0 if is_on_host else snapshots // num_shards,
        "weights in bfloat16": _cast_bytes(shape, run, is_sharded=is_sharded),
        "activations": activations,
        "head": head,
        # The activations are gone when the embedding gets its gradient.
        "embedding": max(0, embedding_bytes(shape, run, num_shards=num_shards) - activations),
        "weight sync": sync_bytes(run, device_type) + (0 if is_sharded else copy),
    }
    host = {
        LOADING: per_node * _loading_bytes(shape, run, num_shards, device_type),
        "optimizer": moments * per_node // num_shards if is_offloaded else 0,
        "reference": snapshots * per_node // num_shards if is_on_host else 0,
        "weight sync": baselines + (copy if is_sharded else 0),
        "checkpoint": (4 * trained + moments + snapshots) * (per_node if is_sharded else 1) // num_shards
        + (wire * total if config.checkpoint.export_model else 0),
    }
    return Memory(device=device, host=host)


def activation_bytes(shape: ModelShape, run: LearnerRun, device_type: str = "cuda") -> int:
    """Return the bytes that the layers keep of a micro-batch for its backward pass.

    With gradient checkpointing, these are the input of each layer, and one whole layer.
    """
    num_tokens = max(run.learner.tokens_per_pass(device_type), longest_row(run))
    of_a_layer = shape.kept_per_token[run.dtype] * num_tokens
    if run.learner.gradient_checkpointing is not True:
        return of_a_layer * shape.num_layers
    return of_a_layer + _bytes_of(run.dtype) * shape.hidden_size * num_tokens * shape.num_layers


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
    of_key, of_token = 2 * _bytes_of(dtype) * _kv_size(text), kept_per_token(text, dtype, ())
    if is_checkpointed:
        of_token += _bytes_of(dtype) * text.hidden_size * text.num_hidden_layers
    return of_key / of_token


def longest_row(run: LearnerRun) -> int:
    """Return the tokens of the longest row that the config allows for sure: a pass has at least one row."""
    config = run.learner
    prompt, limit = config.data.max_prompt_tokens or 0, run.server.get("max_model_len")
    row = prompt + config.sampling.max_tokens
    if config.environment.is_used:
        row = config.environment.max_episode_tokens or limit or row
    return min(row, limit or row)


def head_bytes(shape: ModelShape, run: LearnerRun, *, tile_logits: int) -> int:
    """Return the bytes of the head's tile and of its weights' gradient.

    A tile of logits takes float32 and a quarter more. The gradient is float32, where tiles add to it. With
    bfloat16, it exists once more in that dtype before it joins the others.
    """
    tile = 5 * tile_logits
    if run.learner.lora.rank:
        return tile
    return tile + (4 + (2 if run.dtype == "bfloat16" else 0)) * shape.vocab_size * shape.hidden_size


def embedding_bytes(shape: ModelShape, run: LearnerRun, *, num_shards: int = 1) -> int:
    """Return the bytes of the embedding's gradient at the end of a backward pass, until it is part of the others.

    It is as large as the embedding, and in bfloat16 exists once more in float32. Ranks that share the policy reduce
    it in float32, and gather the embedding again unless it is the head.
    """
    if run.learner.lora.rank:
        return 0
    wire, size = _bytes_of(run.dtype), shape.vocab_size * shape.hidden_size
    if num_shards == 1:
        return (wire + (4 if wire == 2 else 0)) * size
    return (wire + 4) * size + 4 * size // num_shards + wire * shape.num_embedding


def sync_bytes(run: LearnerRun, device_type: str = "cuda") -> int:
    """Return the bytes of the buffers of a weight sync, which all servers share."""
    return NUM_BUFFERS * min(SPAN_BYTES[device_type], run.learner.weight_sync.bucket_mib << 20)


def server_memory(shape: ModelShape, run: LearnerRun, *, num_workers: int = 1) -> Memory:
    """Return the server's memory, of each worker's GPU, without the KV cache.

    The KV cache takes what is left (see `kv_bytes_per_token`).
    """
    wire, sync = _bytes_of(run.dtype), run.learner.weight_sync
    weights = wire * shape.num_parameters
    device = {"weights": weights // num_workers, "weight sync": SERVER_BUCKETS * (sync.bucket_mib << 20)}
    host = {"weight sync": weights if sync.compression == "delta" else 0}  # shared by all workers
    return Memory(device=device, host=host)


def kv_bytes_per_token(shape: ModelShape, run: LearnerRun, *, num_workers: int = 1) -> int:
    """Return the bytes of one token in the KV cache of each worker."""
    return 2 * shape.num_layers * shape.kv_size * _bytes_of(run.dtype) // num_workers


def describe(memory: Memory) -> str:
    """Format as `12.3 GiB per GPU (weights 1.8, …) and 4.1 GiB of host memory`.

    Parts below 0.05 GiB are left out.
    """
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.device.items() if size >= 0.05 * GIB)
    per_gpu = f"{memory.device_gib:.1f} GiB per GPU{f' ({parts})' if parts else ''}"
    return f"{per_gpu} and {memory.host_gib:.1f} GiB of host memory"


def _bytes_of(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _num_snapshots(config: LearnerConfig) -> int:
    is_held = config.reference.kind != "none" and config.reference.endpoint is None
    return (config.reference.num_snapshots or 1) if is_held else 0


def _loading_bytes(shape: ModelShape, run: LearnerRun, num_shards: int, device_type: str) -> int:
    """Return the bytes of host memory that a rank takes to load its weights, besides those of its device."""
    width = _bytes_of(run.dtype) if run.learner.lora.rank else 4
    if num_shards > 1:
        return 2 * width * shape.num_largest
    return 0 if device_type == "cpu" else width * shape.num_parameters


def _cast_bytes(shape: ModelShape, run: LearnerRun, *, is_sharded: bool) -> int:
    """Return the bytes of parameters that are cast for a pass.

    A pass keeps its casts for the backward pass, with gradient checkpointing those of one layer. FSDP2
    gathers two layers at a time, and the head for the whole pass.
    """
    if is_sharded:
        head = shape.vocab_size * shape.hidden_size
        of_layers = shape.num_parameters - shape.num_embedding - head
        return _bytes_of(run.dtype) * (head + 2 * of_layers // shape.num_layers)
    if run.dtype == "float32":
        return 0
    trained = num_trained(shape, run.learner)
    if run.learner.gradient_checkpointing is not True:
        return 2 * trained
    head = 0 if run.learner.lora.rank else shape.vocab_size * shape.hidden_size
    of_layers = trained - head - (0 if run.learner.lora.rank else shape.num_embedding)
    return 2 * (head + of_layers // shape.num_layers)


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
