"""Servers and learner on one node: `slipstream colocate run.toml [switches] [--key value ...]`.

    switches: --resume, --dry-run, --quiet, --json-logs
    place by `[deploy]` ─▶ start all ─▶ prefix output ─▶ forward signals ─▶ when one exits: stop all, or restart it

If the config names no GPUs, the server gets the first, the learner the next and the server of a reference those after
it; if there are too few, they share the first. If there is no GPU and the config names no cores, each side gets half
of the cores.
All output is also written to RUN_DIR/logs/.
"""

import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from deploy.arguments import Launch, read_arguments
from deploy.placement import DeployConfig, ProcessSpec, rank_specs, reference_spec, server_specs
from deploy.supervisor import SupervisedProcess, Supervisor
from inference_server.config import ServerRun
from learner.config import LearnerRun
from learner.config.shared_gpu import ServersOnGpu
from protocol import console
from protocol.hardware import halves, has_gpu, usable_gpus
from protocol.installation import module_command

log = logging.getLogger(__name__)
PROGRAM = "slipstream colocate"
PURPOSE = """Run servers and learner on this node until the learner is done, placed by [deploy].

Keys of [server] and [learner] are flags too: `slipstream serve --help` and `slipstream train --help` list them.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all processes until the learner is done, then exit with its code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console.pop_switches(arguments)  # they stay in the arguments, because `colocate` passes them on
    console.start_logging()
    with console.exit_on_user_error():
        sys.exit(colocate(arguments))


def colocate(arguments: list[str]) -> int:
    """Run all processes; return the learner's exit code, or 1 if a server exited first.

    Raises:
        ConfigError: The config or a flag is invalid.
    """
    launch = read_arguments(arguments, PROGRAM, PURPOSE)
    if launch is None:
        return 0
    config = with_gpus(launch.config, launch.server_run, launch.learner_run, usable_gpus())
    servers_on_gpu = servers_on_learner_gpu(config, launch.server_run)
    for note in (shared_gpu_note(servers_on_gpu), one_sided_note(config)):
        if note is not None:
            log.warning(note)
    config = with_cores(config, launch.server_run, launch.learner_run)
    node = Node(
        config=config, launch=launch, logs=launch.make_logs(),
        server=(*module_command("inference_server"), *launch.server),
        learner=(*module_command("learner"), *launch.learner),
        learner_environment=servers_on_gpu.environment() if servers_on_gpu else {},
    )  # fmt: skip
    specs = server_specs(config, launch.server_run)
    rank_specs(config, launch.learner_run, port=0)  # raises ConfigError before any process is started
    if (reference := reference_spec(config, launch.server_run, launch.learner_run)) is not None:
        specs.append(reference)
    servers = {spec.name: partial(node.start, node.server, spec) for spec in specs}
    return Supervisor(servers, node.start_learner, config).run()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Config and commands for starting the processes of a node."""

    config: DeployConfig
    launch: Launch
    logs: Path
    server: tuple[str, ...]
    learner: tuple[str, ...]
    """Command of each kind of process, without the flags of its ProcessSpec."""
    learner_environment: dict[str, str]
    """Environment of each rank, in addition to that of its ProcessSpec."""

    def start(self, command: tuple[str, ...], spec: ProcessSpec) -> SupervisedProcess:
        environment = self.launch.environment | spec.environment
        return SupervisedProcess(spec.name, (*command, *spec.flags), environment, self.logs / f"{spec.name}.log")

    def start_learner(self, *, again: bool) -> list[SupervisedProcess]:
        """Start all ranks, with a port for their rendezvous that is free now."""
        command = (*self.learner, *self.launch.resume_switch(again=again))
        ranks = []
        for spec in rank_specs(self.config, self.launch.learner_run, free_port()):
            environment = spec.environment | self.learner_environment
            ranks.append(self.start(command, msgspec.structs.replace(spec, environment=environment)))
        return ranks


def with_gpus(
    config: DeployConfig, server_run: ServerRun, learner_run: LearnerRun, gpus: Sequence[int]
) -> DeployConfig:
    """Give the server, the learner and the server of a reference GPUs of their own, unless any are assigned.

    If there are too few, or learner.weight_sync.transport is ipc, server and learner share what `reference_gpus`
    leaves. Without `reference_gpus`, nothing is assigned then.
    """
    num_workers = server_run.server.num_workers
    free = [gpu for gpu in gpus if gpu not in config.reference_gpus]
    num_needed = num_workers + 1 + (num_workers if config.reference_model and not config.reference_gpus else 0)
    is_assigned = config.server_gpus or config.learner_gpus
    if is_assigned or config.num_servers > 1 or config.num_ranks > 1 or len(free) < num_workers:
        return config
    is_shared = learner_run.learner.weight_sync.transport == "ipc" or len(free) < num_needed
    if is_shared and not config.reference_gpus:
        return config
    of_server, of_learner = tuple(free[:num_workers]), free[0 if is_shared else num_workers]
    of_reference = config.reference_gpus or tuple(free[num_workers + 1 : num_needed])
    log.info(
        "the server uses GPU(s) %s, the learner GPU %d%s, %d more are idle; deploy.server_gpus, deploy.learner_gpus "
        "and deploy.reference_gpus override this",
        _listed(of_server), of_learner, f", the reference GPU(s) {_listed(of_reference)}" if of_reference else "",
        len(set(free) - {*of_server, of_learner, *of_reference}),
    )  # fmt: skip
    return msgspec.structs.replace(
        config, server_gpus=(of_server,), learner_gpus=(of_learner,), reference_gpus=of_reference
    )


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus))


def with_cores(config: DeployConfig, server_run: ServerRun, learner_run: LearnerRun) -> DeployConfig:
    """Give each side half of the cores, unless any are assigned or there is a GPU.

    The server of a reference gets a part of the servers' half, or shares it if that is one core.
    """
    num_cores = len(os.sched_getaffinity(0))
    cores = (config.server_cores, config.learner_cores, config.reference_cores)
    is_assigned = any(
        (config.server_gpus, config.learner_gpus, *cores, server_run.server.cpu_cores, learner_run.learner.cpu_cores)
    )
    if is_assigned or has_gpu() or num_cores < 2:
        return config
    of = halves(num_cores)
    server_cores = of["server"]
    reference_cores = server_cores[len(server_cores) // 2 :] if config.reference_model and len(server_cores) > 1 else ()
    return msgspec.structs.replace(
        config,
        server_cores=(tuple(core for core in server_cores if core not in reference_cores),),
        learner_cores=(of["learner"],),
        reference_cores=reference_cores,
    )


def servers_on_learner_gpu(config: DeployConfig, server_run: ServerRun) -> ServersOnGpu | None:
    """Return what the servers take of the GPU of a learner's rank, or None if no server uses one.

    Of several GPUs, this is the one that most servers use, because all ranks plan alike.
    """
    server = server_run.server
    of_servers = [*(config.server_gpus or [()] * config.num_servers)]
    if config.reference_model:
        of_servers.append(config.reference_gpus)
    is_assigned = bool(config.server_gpus or config.learner_gpus)
    # GPUs of the reference alone limit only its server. A process without any uses the first.
    shared = [gpus for gpus in of_servers if (set(gpus) & {*config.learner_gpus} if is_assigned else not gpus)]
    if not shared or not has_gpu():
        return None
    num_on_gpu = [sum(gpu in gpus for gpus in shared) for gpu in config.learner_gpus] if is_assigned else [len(shared)]
    return ServersOnGpu(
        num_servers=max(num_on_gpu),
        num_shards=max(1, (len(shared[0]) or server.num_workers) // server.data_parallel_size),
        kv_cache_memory_mib=server.kv_cache_memory_mib,
        gpu_memory_utilization=server.gpu_memory_utilization,
    )


def shared_gpu_note(servers: ServersOnGpu | None) -> str | None:
    """Return a warning if both sides use one GPU and vLLM would measure how much of it is free."""
    if servers is None or servers.kv_cache_memory_mib is not None:
        return None
    return (
        f"server and learner share one GPU, of which the server takes {servers.gpu_memory_utilization:.0%} "
        "(server.gpu_memory_utilization) if that much is free when it starts, and counts what the learner takes "
        "meanwhile as its own; set server.kv_cache_memory_mib, or give each side GPUs with deploy.server_gpus and "
        "deploy.learner_gpus"
    )


def one_sided_note(config: DeployConfig) -> str | None:
    """Return a warning if a side sees no GPU because only the other side has some assigned."""
    if not has_gpu() or bool(config.server_gpus) == bool(config.learner_gpus):
        return None
    own, other, side = (
        ("server_gpus", "learner_gpus", "learner") if config.server_gpus else ("learner_gpus", "server_gpus", "server")
    )
    return (
        f"deploy.{own} is set but deploy.{other} is not, so the {side} sees no GPU and computes on the CPU; set "
        f"deploy.{other}, or remove deploy.{own}"
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
