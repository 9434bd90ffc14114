"""The `[deploy]` section of the config file, and the placement of servers and ranks on a node.

    [deploy] ─▶ flags and environment of each process: its GPUs, its cores, its ports

This sits between the config file and the supervisor, which starts the processes. On a Ray cluster,
ray.py places them by `[deploy.ray]`.
"""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol.config import Seconds, SharedConfig
from protocol.errors import ConfigError

Indices = tuple[int, ...]


def _refuse_shared(what: str, parts: tuple[Indices, ...]) -> None:
    """Raise ValueError if two processes share a GPU or core, or a process gets none.

    NCCL does not allow two ranks on one GPU by default.
    Processes whose threads spin on one core slow each other down tenfold.
    """
    taken: set[int] = set()
    for part in parts:
        if not part:
            raise ValueError(f"{what}: an empty list gives a process nothing; list at least one, or remove the key")
        for index in part:
            if index < 0:
                raise ValueError(f"{what}: {index} is not an index; expected 0 or more. Count from 0")
            if index in taken:
                raise ValueError(f"{what}: {index} is assigned twice; each process needs its own")
            taken.add(index)


Count = Annotated[int, msgspec.Meta(ge=1)]


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that only `slipstream ray` reads."""

    servers: Count = 1
    """Number of servers. Each reserves one GPU per worker, all on one node."""
    ranks: Count = 1
    """Number of learner ranks. Each reserves one GPU."""
    rank_0_with_driver: bool = False
    """Whether rank 0 runs on the node where `slipstream ray` was started, whose local disk may then hold
    run_dir if all nodes see the directory of `keys`. false: on any node, and all nodes see run_dir."""
    use_gpus: bool = True
    """Whether servers and ranks compute on GPUs. false: they reserve CPUs only."""
    cpus_per_process: Count = 1
    """Number of CPUs that each server and each rank reserves. Ray also sets it as their OMP_NUM_THREADS."""
    start_timeout_s: Seconds = 600.0
    """Maximum time until the cluster has room for the servers and ranks, at the start and after a node is
    lost, in seconds."""


class DeployConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that only deploy reads. The default is one server and one rank."""

    server_gpus: Annotated[tuple[Indices, ...], tyro.conf.Suppress] = ()
    """GPUs of each server. [[0, 1], [2, 3]]: two servers of two workers each. Without server_gpus and
    learner_gpus, the server gets the first of several GPUs, one per worker, and the learner the next; both share
    the first if there are too few, or learner.weight_sync.transport is ipc. If only one of the two keys is set,
    the other side sees no GPU."""
    learner_gpus: Annotated[Indices, tyro.conf.Suppress] = ()
    """GPUs of the learner, one rank on each."""
    server_cores: Annotated[tuple[Indices, ...], tyro.conf.Suppress] = ()
    """Cores of each server, as positions in the list of cores that colocate may use."""
    learner_cores: Annotated[tuple[Indices, ...], tyro.conf.Suppress] = ()
    """Cores of each learner rank, as positions in the same list."""
    reference_model: str | None = None
    """Model of one more server, at learner.reference.endpoint, which colocate starts with the other settings of
    [server], also quantization, but without adapters and routed experts. Unset: the reference's server, if
    there is one, is started separately."""
    reference_gpus: Annotated[Indices, tyro.conf.Suppress] = ()
    """GPUs of this server. Required if server_gpus or learner_gpus is set. Otherwise: those after the learner's,
    one per worker."""
    reference_cores: Annotated[Indices, tyro.conf.Suppress] = ()
    """Cores of this server, as positions in the same list."""
    restart: Literal["never", "on-failure"] = "never"
    """Reaction to a server that exits or a learner that fails. never: end the run; on-failure: restart it,
    the learner with --resume, unless its exit code is 2, an error that a person has to solve."""
    max_restarts: int = 3
    """Maximum number of restarts within an hour, for each server and for the learner. on-failure only; the
    next failure ends the run."""
    ray: RayConfig = RayConfig()

    @property
    def num_servers(self) -> int:
        return max(len(self.server_gpus), len(self.server_cores), 1)

    @property
    def num_ranks(self) -> int:
        return max(len(self.learner_gpus), len(self.learner_cores), 1)

    def __post_init__(self) -> None:
        for what, gpus, cores in (
            ("server", self.server_gpus, self.server_cores),
            ("learner", tuple((gpu,) for gpu in self.learner_gpus), self.learner_cores),
        ):
            if gpus and cores and len(gpus) != len(cores):
                raise ValueError(
                    f"{what}_gpus has {len(gpus)} entries, but {what}_cores has {len(cores)}; use the same number, or "
                    "remove one"
                )
        _refuse_shared("server_gpus", self.server_gpus)  # the learner may share one (transport ipc)
        _refuse_shared("learner_gpus", tuple((gpu,) for gpu in self.learner_gpus))
        of_reference = tuple(filter(None, (self.reference_cores,)))
        cores = (*self.server_cores, *self.learner_cores, *of_reference)
        _refuse_shared("server_cores, learner_cores and reference_cores", cores)
        if self.max_restarts < 1:
            raise ValueError(
                f'max_restarts = {self.max_restarts} must be at least 1; to disable restarts, set restart = "never"'
            )


class DeployRun(SharedConfig):
    """Configuration of `slipstream colocate`, which ignores the other sections."""

    COMMON = ("model", "run_dir", "deploy.restart")
    deploy: DeployConfig = DeployConfig()
    """Part of the node that each process gets."""
    server: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Section of the server, ignored here."""
    learner: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Section of the learner, ignored here."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Name, flags and environment of a process to start."""

    name: str
    flags: tuple[str, ...]
    """Flags appended to those of the command line."""
    environment: dict[str, str]


def server_specs(config: DeployConfig, run: ServerRun) -> list[ProcessSpec]:
    """Return the spec of each server.

    Raises:
        ConfigError: The server's own section contradicts the placement.
    """
    if run.server.nnodes > 1:
        raise ConfigError(
            f"server.nnodes = {run.server.nnodes}, but colocate starts the processes of one node; start "
            "`slipstream serve` on each node"
        )
    if config.server_cores and run.server.cpu_cores is not None:
        raise ConfigError("server.cpu_cores and deploy.server_cores both set the servers' cores; remove one of them")
    if config.num_servers != len(run.servers):
        raise ConfigError(
            f"deploy places {config.num_servers} server(s), but the run has {len(run.servers)} endpoint(s): "
            f"{', '.join(run.servers)}. Set one endpoint for each server, as in endpoints = "
            '["tcp://127.0.0.1:5757", "tcp://127.0.0.1:5758"]'
        )
    specs = []
    for i in range(config.num_servers):
        flags = _addresses(run, i) if run.endpoints else []
        if config.server_gpus:
            flags += _workers(run, len(config.server_gpus[i]))
        if config.server_cores:
            flags += ["--server.cpu-cores", *map(str, config.server_cores[i])]
        gpus = config.server_gpus[i] if config.server_gpus else ()
        environment = _visible(config, gpus)
        specs.append(
            ProcessSpec(name=_name("server", i, config.num_servers), flags=tuple(flags), environment=environment)
        )
    return specs


def reference_spec(config: DeployConfig, server_run: ServerRun, learner_run: LearnerRun) -> ProcessSpec | None:
    """Return the spec of the reference's server, if this node starts one.

    Raises:
        ConfigError: The run has no reference on a server, no GPU is left for it, or the server's own section
            contradicts the placement.
    """
    reference = learner_run.learner.in_effect().reference
    if config.reference_model is None:
        return None
    if (endpoint := reference.endpoint) is None:
        raise ConfigError(
            f"deploy.reference_model = {config.reference_model!r}, but learner.reference.endpoint is not set; set it, "
            "as in tcp://127.0.0.1:5767"
        )
    if (config.server_gpus or config.learner_gpus) and not config.reference_gpus:
        raise ConfigError(
            "deploy.server_gpus or deploy.learner_gpus is set, so the server of deploy.reference_model would see no "
            "GPU; set deploy.reference_gpus, or remove the other two"
        )
    flags = [
        "--model", config.reference_model, "--endpoint", endpoint, "--server.http-port", "0",
        # Keys of the policy's servers: a reference returns no experts, and its copies of the policy arrive merged.
        "--server.return-routed-experts", "false", "--server.max-lora-rank", "0",
    ]  # fmt: skip
    if reference.is_synced:  # the KL to a quantized copy of the policy would contain the rounding
        flags += ["--server.quantization", "None", "--server.kv-cache-dtype", "None"]
    if config.reference_gpus:
        flags += _workers(server_run, len(config.reference_gpus))
    if config.reference_cores:
        flags += ["--server.cpu-cores", *map(str, config.reference_cores)]
    return ProcessSpec(name="reference", flags=tuple(flags), environment=_visible(config, config.reference_gpus))


def rank_specs(config: DeployConfig, run: LearnerRun, port: int) -> list[ProcessSpec]:
    """Return the spec of each rank. The ranks rendezvous at `port`.

    Raises:
        ConfigError: The learner's own section contradicts the placement.
    """
    if config.learner_cores and run.learner.cpu_cores is not None:
        raise ConfigError("learner.cpu_cores and deploy.learner_cores both set the learner's cores; remove one of them")
    specs = []
    for rank in range(config.num_ranks):
        cores = map(str, config.learner_cores[rank]) if config.learner_cores else ()
        flags = ("--learner.cpu-cores", *cores) if config.learner_cores else ()
        environment = _visible(config, config.learner_gpus) | _rank(config, rank, port)
        specs.append(ProcessSpec(name=_name("learner", rank, config.num_ranks), flags=flags, environment=environment))
    return specs


def _name(kind: str, index: int, count: int) -> str:
    return f"{kind}{index}" if count > 1 else kind


def _addresses(run: ServerRun, index: int) -> list[str]:
    http_port = run.server.http_port + index if run.server.http_port else 0
    return ["--endpoint", run.endpoints[index], "--server.http-port", str(http_port)]


def _workers(run: ServerRun, num_gpus: int) -> list[str]:
    """Return flags for one worker per GPU, with as many replicas as configured.

    Raises:
        ConfigError: The configured number of workers does not fit the GPUs.
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
    """Return the environment that limits a process to its GPUs, which may be none.

    GPUs of the reference alone limit only its server.
    """
    if not gpus and not config.server_gpus and not config.learner_gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def _rank(config: DeployConfig, rank: int, port: int) -> dict[str, str]:
    if config.num_ranks == 1:
        return {}
    position = RankPosition(rank=rank, num_ranks=config.num_ranks, local_rank=rank, local_num_ranks=config.num_ranks)
    return position.environment("127.0.0.1", port, on_gpu=bool(config.learner_gpus))


class RankPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a rank among all ranks, and among those of its node."""

    rank: int
    num_ranks: int
    local_rank: int
    local_num_ranks: int

    def environment(self, address: str, port: int, *, on_gpu: bool) -> dict[str, str]:
        """Return the environment that torchrun would set. The ranks rendezvous at the address of rank 0."""
        variables = {
            "RANK": str(self.rank), "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.num_ranks), "LOCAL_WORLD_SIZE": str(self.local_num_ranks),
            "MASTER_ADDR": address, "MASTER_PORT": str(port),
        }  # fmt: skip
        if not on_gpu:
            variables["ACCELERATE_USE_CPU"] = "true"
        return variables
