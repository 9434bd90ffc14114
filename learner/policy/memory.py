"""Estimate the memory that a model needs on both sides, from its shape and the config, before loading it.

Pure. Each part is a short formula that can be checked against tensors. docs/memory-formulas.md explains them.
Two things are not counted: CUDA's own memory of about 1 GB, and the allocator's loss between blocks.
"""

import msgspec

from learner.config import LearnerConfig, LearnerRun
from learner.forward.lm_head import TILE_LOGITS
from learner.policy.model_shape import ModelShape, bytes_of
from protocol.weights.buckets import SPAN_BYTES
from protocol.weights.dense import NUM_BUFFERS

GIB = 1 << 30


BYTES_OF_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes of both moments of a parameter. 8-bit moments have a float32 scale for each block of 256."""
SERVER_BUCKETS = 3
LOADING = "weights while they are loaded"


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
    config, wire = run.learner, bytes_of(run.dtype)
    trained, total = num_trained(shape, config), shape.num_parameters
    frozen = total if config.lora.rank else 0
    per_node = ranks_per_node or num_ranks
    is_sharded, is_offloaded = num_shards > 1, config.optimizer.offload is True and device_type != "cpu"
    moments = int(BYTES_OF_MOMENTS[config.optimizer.kind] * trained)
    snapshots = (4 if config.reference.kind == "ema" else wire) * trained * _num_snapshots(config)
    is_on_host = config.reference.device == "cpu"
    copy = wire * total if config.weight_sync.overlap_with_training else 0
    baselines = wire * total if _sends_deltas(run) else 0
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
    return of_a_layer + bytes_of(run.dtype) * shape.hidden_size * num_tokens * shape.num_layers


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
    wire, size = bytes_of(run.dtype), shape.vocab_size * shape.hidden_size
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
    sync, num_linear = run.learner.weight_sync, 0
    if run.server.get("quantization"):  # embedding and head, which may be one, are not quantized
        num_linear = shape.num_parameters - shape.num_embedding - shape.vocab_size * shape.hidden_size
    weights = num_linear + bytes_of(_dtype_of_server(run)) * (shape.num_parameters - num_linear)
    device = {"weights": weights // num_workers, "weight sync": SERVER_BUCKETS * (sync.bucket_mib << 20)}
    num_copies = _sends_deltas(run) + bool(run.server.get("overlap_weight_loading"))
    # As they are sent, and shared by all workers.
    host = {"weight sync": bytes_of(run.dtype) * shape.num_parameters * num_copies}
    return Memory(device=device, host=host)


def _sends_deltas(run: LearnerRun) -> bool:
    """Return whether weight syncs keep the weights of the previous one: an adapter is always sent whole."""
    sync, rank = run.learner.weight_sync, run.learner.lora.rank
    sends_adapter = rank > 0 and sync.lora == "adapter" and run.server.get("max_lora_rank", rank) >= rank
    return sync.compression == "delta" and not sends_adapter


def kv_bytes_per_token(shape: ModelShape, run: LearnerRun, *, num_workers: int = 1) -> int:
    """Return the bytes of one token in the KV cache of each worker."""
    width = 1 if run.server.get("kv_cache_dtype") else bytes_of(_dtype_of_server(run))
    return 2 * shape.num_layers * shape.kv_size * width // num_workers


def _dtype_of_server(run: LearnerRun) -> str:
    return str(run.server.get("dtype") or run.dtype)


def describe(memory: Memory) -> str:
    """Format as `12.3 GiB per GPU (weights 1.8, …) and 4.1 GiB of host memory`.

    Parts below 0.05 GiB are left out.
    """
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.device.items() if size >= 0.05 * GIB)
    per_gpu = f"{memory.device_gib:.1f} GiB per GPU{f' ({parts})' if parts else ''}"
    return f"{per_gpu} and {memory.host_gib:.1f} GiB of host memory"


def _num_snapshots(config: LearnerConfig) -> int:
    is_held = config.reference.kind != "none" and config.reference.endpoint is None
    return (config.reference.num_snapshots or 1) if is_held else 0


def _loading_bytes(shape: ModelShape, run: LearnerRun, num_shards: int, device_type: str) -> int:
    """Return the bytes of host memory that a rank takes to load its weights, besides those of its device."""
    width = bytes_of(run.dtype) if run.learner.lora.rank else 4
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
        return bytes_of(run.dtype) * (head + 2 * of_layers // shape.num_layers)
    if run.dtype == "float32":
        return 0
    trained = num_trained(shape, run.learner)
    if run.learner.gradient_checkpointing is not True:
        return 2 * trained
    head = 0 if run.learner.lora.rank else shape.vocab_size * shape.hidden_size
    of_layers = trained - head - (0 if run.learner.lora.rank else shape.num_embedding)
    return 2 * (head + of_layers // shape.num_layers)
