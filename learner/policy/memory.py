"""Estimate the memory that a model needs on both sides, from its shape and the config, before loading it.

Pure. Each part is a short formula that can be checked against tensors. docs/memory.md explains the formulas.
Two things are not counted: CUDA's own memory of about 1 GB, and the allocator's loss between blocks.
"""

from typing import Any

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
BYTES_PER_HIDDEN = {"float32": 40, "bfloat16": 24}
BYTES_PER_INTERMEDIATE = {"float32": 16, "bfloat16": 8}
"""Bytes that a layer keeps of each token for its backward pass, per hidden and per intermediate unit.

Measured on Qwen2 and Llama, whose MLP is gated.
"""
BYTES_OF_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes of both moments of a parameter. 8-bit moments have a float32 scale for each block of 256."""
SERVER_BUCKETS = 3


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a model that determine its memory."""

    num_parameters: int
    """Number of parameters, tied weights once."""
    num_active: int
    """Number of parameters that a token uses, without the experts that its router leaves out."""
    num_embedding: int
    """Number of parameters that are only looked up; tied weights: 0."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
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
        return sum(self.host.values()) / GIB


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Return the shape of a model, which is built on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text, head = config.get_text_config(), model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    layers = list(text.per_layer_config) if text.is_heterogeneous else [text]
    return ModelShape(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_active=sum(parameter.numel() for parameter in model.parameters()) - _num_idle(model),
        num_embedding=0 if embedding is getattr(head, "weight", None) else embedding.numel(),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=max(map(_intermediate_size, layers)),
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
    shape: ModelShape, run: LearnerRun, *, num_ranks: int = 1, is_sharded: bool = False, device_type: str = "cuda"
) -> Memory:
    """Return the learner's memory: of each rank's GPU, and of a node with all ranks.

    On a CPU, the first part is what would be on the GPU. Servers of `endpoints_from` count as one.
    """
    config, wire = run.learner, _bytes_of(run.dtype)
    trained, total = num_trained(shape, config), shape.num_parameters
    frozen = total if config.lora.rank else 0
    share = num_ranks if is_sharded else 1
    moments = int(BYTES_OF_MOMENTS[config.optimizer.kind] * trained)
    snapshots = (4 if config.reference.kind == "ema" else wire) * trained * _num_snapshots(config)
    is_on_host = config.reference.device == "cpu"
    copy = wire * total if config.weight_sync.overlap_with_training else 0
    baselines = wire * total if config.weight_sync.compression == "delta" else 0
    device = {
        "weights": (4 * trained + wire * frozen) // share,
        "gradients": 4 * trained // share,
        "optimizer": moments // share,
        "reference": 0 if is_on_host else snapshots // share,
        "weights in bfloat16": _cast_bytes(shape, run, is_sharded=is_sharded),
        "activations": activation_bytes(shape, run, device_type),
        "head": head_bytes(shape, run, tile_logits=TILE_LOGITS[device_type]),
        "weight sync": sync_bytes(run, device_type) + (0 if is_sharded else copy),
    }
    host = {
        "weights while they are loaded": 4 * total * num_ranks,
        "reference": snapshots if is_on_host else 0,
        "weight sync": baselines + (copy if is_sharded else 0),
        "checkpoint": 4 * trained + moments + snapshots + (wire * total if config.checkpoint.export_model else 0),
    }
    return Memory(device=device, host=host)


def activation_bytes(shape: ModelShape, run: LearnerRun, device_type: str = "cuda") -> int:
    """Return the bytes that the layers keep of a micro-batch for its backward pass.

    With gradient checkpointing, these are the input of each layer, and one whole layer.
    """
    num_tokens = run.learner.tokens_per_pass(device_type)
    of_a_layer = (
        BYTES_PER_HIDDEN[run.dtype] * shape.hidden_size + BYTES_PER_INTERMEDIATE[run.dtype] * shape.intermediate_size
    ) * num_tokens
    if not run.learner.gradient_checkpointing:
        return of_a_layer * shape.num_layers
    return of_a_layer + _bytes_of(run.dtype) * shape.hidden_size * num_tokens * shape.num_layers


def head_bytes(shape: ModelShape, run: LearnerRun, *, tile_logits: int) -> int:
    """Return the bytes of the head's tile and of its weights' gradient.

    A tile of logits takes float32 and a quarter more. The gradient is float32, where tiles add to it. With
    bfloat16, it exists once more in that dtype before it joins the others.
    """
    tile = 5 * tile_logits
    if run.learner.lora.rank:
        return tile
    return tile + (4 + (2 if run.dtype == "bfloat16" else 0)) * shape.vocab_size * shape.hidden_size


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
    return 0 if config.reference.kind == "none" else config.reference.num_snapshots or 1


def _cast_bytes(shape: ModelShape, run: LearnerRun, *, is_sharded: bool) -> int:
    """Return the bytes of parameters that are cast for a pass.

    A pass keeps its casts for the backward pass, with gradient checkpointing those of one layer. FSDP2
    gathers two layers at a time.
    """
    if is_sharded:
        return 2 * _bytes_of(run.dtype) * shape.num_parameters // shape.num_layers
    if run.dtype == "float32":
        return 0
    trained = num_trained(shape, run.learner)
    if not run.learner.gradient_checkpointing:
        return 2 * trained
    head = 0 if run.learner.lora.rank else shape.vocab_size * shape.hidden_size
    of_layers = trained - head - (0 if run.learner.lora.rank else shape.num_embedding)
    return 2 * (head + of_layers // shape.num_layers)


def _kv_size(text: Any) -> int:
    num_heads: int = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return int((getattr(text, "num_key_value_heads", None) or num_heads) * head_dim)


def _intermediate_size(text: Any) -> int:
    for key in ("intermediate_size", "n_inner", "ffn_dim"):
        if isinstance(size := getattr(text, key, None), int):
            return size
    return 4 * text.hidden_size
