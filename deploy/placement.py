"""The placement of servers and learner ranks on a node: the flags and environment of each process.

    DeployConfig ─▶ a ProcessSpec for each server and each rank of the learner ─▶ supervisor.py starts them

Pure: nothing here starts a process or inspects the machine.
Invariant: no two processes share a core, an address or a rank, and no two servers or two ranks share a GPU.
"""

import msgspec

from deploy.config import DeployConfig
from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol.errors import ConfigError

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
"""Environment that enables FSDP2 in accelerate.

Every rank loads the model. With `accelerate launch`, only rank 0 does.
"""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Name, flags and environment of a process to start."""

    name: str
    flags: tuple[str, ...]
    """Flags appended to those of the command line."""
    environment: dict[str, str]


def server_places(config: DeployConfig, run: ServerRun) -> list[ProcessSpec]:
    """Return the spec of each server.

    Raises:
        ConfigError: If the server's own section contradicts the placement.
    """
    if config.server_cores and run.server.cpu_cores is not None:
        raise ConfigError("server.cpu_cores and deploy.server_cores both set the servers' cores; remove one of them")
    if config.num_servers != len(run.servers):
        raise ConfigError(
            f"deploy places {config.num_servers} server(s), but the run has {len(run.servers)} endpoint(s): "
            f"{', '.join(run.servers)}. "
            'Set one endpoint for each server, as in endpoints = ["tcp://127.0.0.1:5757", "tcp://127.0.0.1:5758"]'
        )
    places = []
    for i in range(config.num_servers):
        flags = _addresses(run, i) if run.endpoints else []
        if config.server_gpus:
            flags += _workers(run, len(config.server_gpus[i]))
        if config.server_cores:
            flags += ["--server.cpu-cores", *map(str, config.server_cores[i])]
        gpus = config.server_gpus[i] if config.server_gpus else ()
        environment = _visible(config, gpus)
        places.append(
            ProcessSpec(name=_name("server", i, config.num_servers), flags=tuple(flags), environment=environment)
        )
    return places


def rank_places(config: DeployConfig, run: LearnerRun, port: int) -> list[ProcessSpec]:
    """Return the spec of each rank. The ranks rendezvous at `port`.

    Raises:
        ConfigError: If the learner's own section contradicts the placement.
    """
    if config.learner_cores and run.learner.cpu_cores is not None:
        raise ConfigError("learner.cpu_cores and deploy.learner_cores both set the learner's cores; remove one of them")
    places = []
    for rank in range(config.num_ranks):
        cores = map(str, config.learner_cores[rank]) if config.learner_cores else ()
        flags = ("--learner.cpu-cores", *cores) if config.learner_cores else ()
        environment = _visible(config, config.learner_gpus) | _rank(config, rank, port)
        places.append(ProcessSpec(name=_name("learner", rank, config.num_ranks), flags=flags, environment=environment))
    return places


def _name(kind: str, index: int, count: int) -> str:
    return f"{kind}{index}" if count > 1 else kind


def _addresses(run: ServerRun, index: int) -> list[str]:
    http_port = run.server.http_port + index if run.server.http_port else 0
    return ["--endpoint", run.endpoints[index], "--server.http-port", str(http_port)]


def _workers(run: ServerRun, num_gpus: int) -> list[str]:
    """Return flags for one worker per GPU, with as many replicas as configured.

    Raises:
        ConfigError: If the configured number of workers does not fit the GPUs.
    """
    server = run.server
    if server.num_workers == num_gpus:
        return []
    if server.tensor_parallel_size == 1 and num_gpus % server.data_parallel_size == 0:
        return ["--server.tensor-parallel-size", str(num_gpus // server.data_parallel_size)]
    replicas = (
        f" times server.data_parallel_size = {server.data_parallel_size}" if server.data_parallel_size > 1 else ""
    )
    raise ConfigError(
        f"server.tensor_parallel_size = {server.tensor_parallel_size}{replicas}, but deploy.server_gpus gives a server "
        f"{num_gpus} GPU(s); make them equal, or remove server.tensor_parallel_size"
    )


def _visible(config: DeployConfig, gpus: tuple[int, ...]) -> dict[str, str]:
    """Return the environment that limits a process to its GPUs, which may be none."""
    if not config.server_gpus and not config.learner_gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def _rank(config: DeployConfig, rank: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun would set for a rank."""
    if config.num_ranks == 1:
        return {}
    num_ranks = str(config.num_ranks)
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not config.learner_gpus:
        variables["ACCELERATE_USE_CPU"] = "true"
    return variables | (FSDP2 if config.sharded else {})
