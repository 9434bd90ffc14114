"""Fit a run to the memory of its ranks, before the model is loaded.

    free memory of each rank ─▶ least of all ranks, without the part of servers on the same GPU: Room
        ─▶ memory_plan.py ─▶ the run without "auto"

Invariant: all ranks plan with the same numbers, so they choose the same settings.
"""

import logging
import os

import msgspec
import torch
from accelerate import Accelerator

from learner.config import LearnerRun
from learner.config.shared_gpu import ServersOnGpu
from learner.policy.memory import GIB, describe, kv_bytes_per_token, server_memory
from learner.policy.memory_plan import Plan, Room, fastest_plan, fits, is_set, make_plan, room_beside
from learner.policy.model_shape import ModelShape
from learner.run_inputs import RunInputs
from protocol.doctor import dtype_finding, free_memory_bytes
from protocol.errors import ConfigError

log = logging.getLogger(__name__)
WORTH_A_LINE_GIB = 4.0


def fit_memory(run_inputs: RunInputs, accelerator: Accelerator) -> LearnerRun:
    """Return the run with the fastest settings that fit the memory of every rank, and log them.

    Every rank calls this before it loads anything. A run that sets all of these keys itself is not refused,
    because the estimate may be wrong; a warning says that it exceeds the memory.

    Raises:
        ConfigError: No settings fit, or learner.sharding is hybrid but the nodes have different numbers of ranks.
    """
    run, shape = run_inputs.run, run_inputs.shape
    room = measure_room(accelerator)
    if run.learner.sharding == "hybrid" and not room.nodes_are_alike:  # here all ranks know, so none waits for others
        raise ConfigError(
            f'learner.sharding = "hybrid" needs as many ranks on each node, but of {room.num_ranks} ranks one node has '
            f'{room.ranks_per_node} and another fewer. Start as many on each, or set learner.sharding to "full"'
        )
    if shape is None:
        return _without_a_shape(run, room)
    if room.device_type == "cuda" and (servers := ServersOnGpu.of_environment()) is not None:
        room = room_beside(servers, shape, run, room)
    plan = fastest_plan(shape, run, room) if is_set(run, room) else make_plan(shape, run, room)
    if accelerator.is_main_process:
        _log(shape, plan, room)
    return plan.run


def measure_room(accelerator: Accelerator) -> Room:
    """Return the ranks, the least memory that any of them has free, and the most ranks that any node has."""
    device = accelerator.device
    free = total = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    found = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = int(found) if found.isdigit() else accelerator.num_processes
    mine = torch.tensor([[free, total, free_memory_bytes(), per_node]], dtype=torch.float64, device=device)
    of_all = accelerator.gather(mine) if accelerator.num_processes > 1 else mine
    least, most_per_node = of_all.min(dim=0).values.tolist(), int(of_all[:, 3].max())
    ranks_per_node = max(1, min(most_per_node, accelerator.num_processes))
    return Room(
        device_gib=least[0] / GIB,
        device_total_gib=least[1] / GIB,
        host_gib=least[2] / GIB,
        device_type=device.type,
        num_ranks=accelerator.num_processes,
        ranks_per_node=ranks_per_node,
        nodes_are_alike=least[3] == most_per_node and accelerator.num_processes % ranks_per_node == 0,
    )


def _without_a_shape(run: LearnerRun, room: Room) -> LearnerRun:
    """Return the run with the fastest settings. RunInputs.shape has logged why nothing is known of its memory."""
    config = run.learner
    learner = msgspec.structs.replace(
        config,
        sharding="none" if config.sharding == "auto" else config.sharding,
        gradient_checkpointing=config.gradient_checkpointing is True,
        micro_batch_tokens=config.tokens_per_pass(room.device_type),
        optimizer=msgspec.structs.replace(config.optimizer, offload=config.optimizer.offload is True),
    )
    return msgspec.structs.replace(run, learner=learner)


def _log(shape: ModelShape, plan: Plan, room: Room) -> None:
    """Log what was chosen and what it needs, if that is much."""
    memory, run = plan.memory, plan.run
    is_too_much = not fits(memory, room)
    if memory.device_gib + memory.host_gib < WORTH_A_LINE_GIB and not is_too_much:
        return
    log.info(dtype_finding(run.dtype).text)
    on_gpu = "" if room.device_type == "cpu" else f"{room.device_gib:.1f} GiB of each GPU and "
    log.log(
        logging.WARNING if is_too_much else logging.INFO,
        "%s parameters with %s: the learner needs about %s; %s%.1f GiB of host memory are free%s; a server with one "
        "worker needs %s, and %.0f KiB per token in flight",
        f"{shape.num_parameters:,}", plan, describe(memory), on_gpu, room.host_gib,
        ", which may be too little" if is_too_much else "", describe(server_memory(shape, run)),
        kv_bytes_per_token(shape, run) / 1024,
    )  # fmt: skip
