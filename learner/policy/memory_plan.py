"""Choose the settings of the learner that decide its memory, before the model is loaded.

    shape, run, Room ─▶ all settings, fastest first ─▶ the first that fits ─▶ Plan
                                                    └▶ none: ConfigError with the smallest changes that would fit

Gradient checkpointing, tokens per pass, sharding and the device of the optimizer's moments are chosen together,
because they trade the same memory against different amounts of time.

Pure. Invariant: a key with a value other than "auto" is kept. Equal arguments give the same plan on every rank.
"""

import itertools
from collections.abc import Iterator, Mapping

import msgspec

from learner.config import LearnerRun
from learner.config.learner import AUTO_TOKENS, AUTO_TOKENS_ON_CPU, Sharding
from learner.config.shared_gpu import ServersOnGpu
from learner.policy.memory import Memory, describe, learner_memory, longest_row, server_memory
from learner.policy.model_shape import ModelShape
from protocol.errors import ConfigError

MARGIN = 0.9
"""Share of the free memory that a plan may use. The rest is for fragments between blocks."""
MIN_TOKENS = 1024
"""Smallest pass that "auto" chooses."""
COST_OF_CHECKPOINTING = 1.3
"""Time of a step, relative to one without: the forward pass runs twice, and a third of the time is its."""
COST_OF_OFFLOAD = 1.1
COST_OF_SHARDING: dict[Sharding, float] = {"none": 1.0, "hybrid": 1.04, "full": 1.08}
COST_OF_HALVING = {False: 0.02, True: 0.04}
"""Part of a pass's time that does not depend on its tokens, unsharded and sharded: launches, and gathered weights."""
ALMOST_FREE = 0.95
"""Share of a GPU that is free if nothing but CUDA itself uses it."""
SERVER_OVERHEAD_GIB = 2.0
"""Memory of a server besides weights, buckets and KV cache: CUDA and its graphs, and the activations of a step."""
MIN_KV_MIB = 256
MAX_RANKS = 1024
LORA_RANK = 16
NUM_CHANGES = 4
Settings = tuple[Sharding, bool, bool, int]
"""Sharding, gradient checkpointing, optimizer offload, and tokens per pass."""
Changes = Mapping[str, object]
"""New values of keys of the learner, such as `reference.device`."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of a learner, and the memory that they may use."""

    host_gib: float
    """Free host memory of each node."""
    device_gib: float = 0.0
    """Free memory of each rank's GPU. Not used on a CPU."""
    device_total_gib: float = 0.0
    """All memory of this GPU, of which other processes may use a part."""
    servers: ServersOnGpu | None = None
    """Servers that will use this GPU too. Their part is not in `device_gib`. None: unknown."""
    device_type: str = "cuda"
    num_ranks: int = 1
    ranks_per_node: int = 1
    """Ranks on the node that has the most, whose host memory is the scarcest."""
    nodes_are_alike: bool = True
    """Whether all nodes have this number of ranks, as "hybrid" needs."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that fit the memory."""

    run: LearnerRun
    """The run, in which none of the planned keys is "auto"."""
    sharding: Sharding
    memory: Memory

    def __str__(self) -> str:
        config = self.run.learner
        return (
            f"sharding = {self.sharding}, micro_batch_tokens = {config.micro_batch_tokens}, gradient_checkpointing = "
            f"{str(config.gradient_checkpointing).lower()}, optimizer.offload = {str(config.optimizer.offload).lower()}"
        )


def room_beside(servers: ServersOnGpu, shape: ModelShape, run: LearnerRun, room: Room) -> Room:
    """Return the room that the servers leave, which may have taken their memory already or not."""
    left = room.device_total_gib - gib_of_servers(servers, shape, run, room)
    return msgspec.structs.replace(room, device_gib=max(0.0, min(room.device_gib, left)), servers=servers)


def gib_of_servers(servers: ServersOnGpu, shape: ModelShape, run: LearnerRun, room: Room) -> float:
    """Return the GiB that servers take of each GPU. All are assumed to have models of this shape."""
    kv_mib = servers.kv_cache_memory_mib
    if kv_mib is None:
        return servers.num_servers * servers.gpu_memory_utilization * room.device_total_gib
    of_one = server_memory(shape, run, num_workers=servers.num_shards).device_gib + kv_mib / 1024 + SERVER_OVERHEAD_GIB
    return servers.num_servers * of_one


def make_plan(shape: ModelShape, run: LearnerRun, room: Room) -> Plan:
    """Return the fastest settings that fit the room.

    Raises:
        ConfigError: Nothing fits.
    """
    found = find_plan(shape, run, room)
    if found is None:
        raise ConfigError(_refusal(shape, run, room))
    return found


def find_plan(shape: ModelShape, run: LearnerRun, room: Room) -> Plan | None:
    """Return the fastest settings that fit the room, or None."""
    for plan in _plans(shape, run, room):
        if fits(plan.memory, room):
            return plan
    return None


def fastest_plan(shape: ModelShape, run: LearnerRun, room: Room) -> Plan:
    """Return the fastest settings, whether they fit or not. They are the run's own where it sets all of them."""
    return next(_plans(shape, run, room))


def fits(memory: Memory, room: Room) -> bool:
    """Return whether the room has this memory, with a margin."""
    if room.device_type == "cpu":
        return memory.device_gib * room.ranks_per_node + memory.host_gib <= MARGIN * room.host_gib
    return memory.device_gib <= MARGIN * room.device_gib and memory.host_gib <= MARGIN * room.host_gib


def is_set(run: LearnerRun, room: Room) -> bool:
    """Return whether the config leaves nothing to choose."""
    return len(_settings(run, room)) == 1


def _settings(run: LearnerRun, room: Room) -> list[Settings]:
    """Return all settings that the config allows, fastest first."""
    config = run.learner
    tokens = _passes(run, room.device_type) if config.micro_batch_tokens == "auto" else [config.micro_batch_tokens]
    checkpointing = [False, True] if config.gradient_checkpointing == "auto" else [config.gradient_checkpointing]
    can_offload = config.optimizer.offload == "auto" and config.optimizer.kind == "adamw" and room.device_type != "cpu"
    offload = [False, True] if can_offload else [config.optimizer.offload is True]
    return sorted(itertools.product(_shardings(run, room), checkpointing, offload, tokens), key=lambda one: _cost(*one))


def _plans(shape: ModelShape, run: LearnerRun, room: Room) -> Iterator[Plan]:
    for sharding, is_checkpointed, is_offloaded, num_tokens in _settings(run, room):
        changes = {
            "sharding": sharding,
            "gradient_checkpointing": is_checkpointed,
            "micro_batch_tokens": num_tokens,
            "optimizer.offload": is_offloaded,
        }
        planned = _with(run, changes)
        yield Plan(run=planned, sharding=sharding, memory=_memory(shape, planned, sharding, room))


def _memory(shape: ModelShape, run: LearnerRun, sharding: Sharding, room: Room) -> Memory:
    return learner_memory(
        shape,
        run,
        num_ranks=room.num_ranks,
        num_shards={"none": 1, "hybrid": room.ranks_per_node, "full": room.num_ranks}[sharding],
        ranks_per_node=room.ranks_per_node,
        device_type=room.device_type,
    )


def _passes(run: LearnerRun, device_type: str) -> list[int]:
    """Return the sizes of passes to try. A pass smaller than the longest row saves nothing."""
    largest = AUTO_TOKENS_ON_CPU if device_type == "cpu" else AUTO_TOKENS
    sizes = [largest]
    while sizes[-1] > max(MIN_TOKENS, longest_row(run)):
        sizes.append(sizes[-1] // 2)
    return sizes


def _shardings(run: LearnerRun, room: Room) -> list[Sharding]:
    config = run.learner
    if room.num_ranks == 1:
        return ["none"]
    if config.sharding != "auto":
        return [config.sharding]
    if config.optimizer.kind == "adamw_8bit":  # bitsandbytes cannot update shards
        return ["none"]
    has_nodes = room.nodes_are_alike and 1 < room.ranks_per_node < room.num_ranks
    return ["none", "hybrid", "full"] if has_nodes else ["none", "full"]


def _cost(sharding: Sharding, is_checkpointed: bool, is_offloaded: bool, num_tokens: int) -> float:
    """Return the estimated time of a step, relative to the fastest settings."""
    of_passes = 1 + COST_OF_HALVING[sharding != "none"] * (AUTO_TOKENS / num_tokens - 1)
    return (
        COST_OF_SHARDING[sharding]
        * (COST_OF_CHECKPOINTING if is_checkpointed else 1.0)
        * (COST_OF_OFFLOAD if is_offloaded else 1.0)
        * of_passes
    )


def _refusal(shape: ModelShape, run: LearnerRun, room: Room) -> str:
    least = min(_plans(shape, run, room), key=lambda plan: (plan.memory.device_gib, plan.memory.host_gib))
    ranks = "1 rank" if room.num_ranks == 1 else f"{room.num_ranks} ranks, {_on_nodes(room)}"
    free = f"{room.host_gib:.1f} GiB of host memory"
    if room.device_type != "cpu":
        taken = room.servers and f" next to its servers' {gib_of_servers(room.servers, shape, run, room):.1f} GiB"
        free = f"{room.device_gib:.1f} GiB on the GPU{taken or ''} and {free}"
    changes = list(itertools.islice(_changes_that_fit(shape, run, room), NUM_CHANGES))
    remedy = f"Set {', or '.join(changes)}" if changes else "No single change would fit: use a smaller model"
    return (
        f"model {run.model} with {shape.num_parameters:,} parameters does not fit {ranks}: with {least}, it needs "
        f"{describe(least.memory)}, but only {free} are free, of which a plan uses {MARGIN:.0%}. {remedy}"
    )


def _on_nodes(room: Room) -> str:
    return f"{room.ranks_per_node} on each node" if room.nodes_are_alike else f"up to {room.ranks_per_node} on a node"


def _changes_that_fit(shape: ModelShape, run: LearnerRun, room: Room) -> Iterator[str]:
    for text, changes, roomier in _changes(shape, run, room):
        if _fits(shape, run, changes, roomier):
            yield text


def _fits(shape: ModelShape, run: LearnerRun, changes: Changes, room: Room) -> bool:
    try:
        changed = _with(run, changes)
    except ValueError:  # they contradict other keys, as an adapter does some references
        return False
    return find_plan(shape, changed, room) is not None


def _changes(shape: ModelShape, run: LearnerRun, room: Room) -> Iterator[tuple[str, Changes, Room]]:
    """Yield changes of the config or the machine, the smallest first.

    The first do not change what is learned, and the last need more GPUs or train another policy.
    """
    config = run.learner
    to_auto = {
        "micro_batch_tokens": config.micro_batch_tokens,
        "gradient_checkpointing": config.gradient_checkpointing,
        "sharding": config.sharding,
        "optimizer.offload": config.optimizer.offload,
    }
    fixed = [key for key, value in to_auto.items() if value != "auto"]
    for keys in [[key] for key in fixed] + ([fixed] if len(fixed) > 1 else []):
        yield " and ".join(f'learner.{key} = "auto"' for key in keys), dict.fromkeys(keys, "auto"), room
    if config.reference.kind != "none" and config.reference.endpoint is None and config.reference.device == "same":
        yield 'learner.reference.device = "cpu"', {"reference.device": "cpu"}, room
    if config.weight_sync.overlap_with_training:
        key = "weight_sync.overlap_with_training"
        yield f"learner.{key} = false", {key: False}, room
    if config.weight_sync.compression == "delta":
        key = "weight_sync.compression"
        yield f'learner.{key} = "none"', {key: "none"}, room
    yield from _smaller_servers(shape, run, room)
    if config.optimizer.kind == "adamw":
        changes = {"optimizer.kind": "adamw_8bit", "optimizer.offload": "auto", "sharding": "auto"}
        yield 'learner.optimizer.kind = "adamw_8bit"', changes, room
    yield from _more_ranks(shape, run, room)
    yield from _shorter_rows(shape, run, room)
    if not config.lora.rank:
        yield f"learner.lora.rank = {LORA_RANK}", {"lora.rank": LORA_RANK}, room


def _smaller_servers(shape: ModelShape, run: LearnerRun, room: Room) -> Iterator[tuple[str, Changes, Room]]:
    """Yield a smaller KV cache, or share of a GPU, for a server that uses it too."""
    if room.device_gib > ALMOST_FREE * room.device_total_gib:
        return
    for text, smaller in _smaller(room.servers or ServersOnGpu()):
        left = room.device_total_gib - gib_of_servers(smaller, shape, run, room)
        roomier = msgspec.structs.replace(room, device_gib=left)
        if left > room.device_gib and find_plan(shape, run, roomier) is not None:
            yield text if room.servers else f"{text}, if a server uses the same GPU", {}, roomier
            return


def _smaller(servers: ServersOnGpu) -> Iterator[tuple[str, ServersOnGpu]]:
    if (kv_mib := servers.kv_cache_memory_mib) is not None:
        while (kv_mib := kv_mib // 2) >= MIN_KV_MIB:
            changed = msgspec.structs.replace(servers, kv_cache_memory_mib=kv_mib)
            yield f"server.kv_cache_memory_mib = {kv_mib}", changed
        return
    for percent in range(85, 5, -5):
        changed = msgspec.structs.replace(servers, gpu_memory_utilization=percent / 100)
        yield f"server.gpu_memory_utilization = {percent / 100:g}", changed


def _more_ranks(shape: ModelShape, run: LearnerRun, room: Room) -> Iterator[tuple[str, Changes, Room]]:
    is_free = run.learner.sharding in ("auto", "full")
    changes = {} if is_free else {"sharding": "auto"}
    num_ranks = room.num_ranks
    while (num_ranks := 2 * num_ranks) <= MAX_RANKS:
        per_node = num_ranks if room.num_ranks == room.ranks_per_node and num_ranks <= 8 else room.ranks_per_node
        roomier = msgspec.structs.replace(room, num_ranks=num_ranks, ranks_per_node=per_node)
        if _fits(shape, run, changes, roomier):
            sharding = "" if is_free else ' with learner.sharding = "auto"'
            yield f"{num_ranks} ranks at the start{sharding}", changes, roomier
            return


def _shorter_rows(shape: ModelShape, run: LearnerRun, room: Room) -> Iterator[tuple[str, Changes, Room]]:
    """Yield shorter completions or episodes, which bound the smallest pass from below."""
    is_played, config = run.learner.environment.is_used, run.learner
    key = "environment.max_episode_tokens" if is_played else "sampling.max_tokens"
    length = longest_row(run) if is_played else config.sampling.max_tokens
    while (length := length // 2) >= MIN_TOKENS // 4:
        if _fits(shape, run, {key: length}, room):
            yield f"learner.{key} = {length}", {key: length}, room
            return


def _with(run: LearnerRun, changes: Changes) -> LearnerRun:
    """Return the run with changed keys of the learner. Raises ValueError if they contradict others."""
    learner = run.learner
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        if section:
            value = msgspec.structs.replace(getattr(learner, section), **{name: value})
        learner = msgspec.structs.replace(learner, **{section or name: value})
    return msgspec.structs.replace(run, learner=learner)
