"""The `[deploy]` section of the config file: which part of the node each process gets."""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from protocol.config import SharedConfig

Places = tuple[int, ...]


def _refuse_shared(what: str, parts: tuple[Places, ...]) -> None:
    """Raise ValueError if two processes share a GPU or core, or a process gets none.

    NCCL does not allow two ranks on one GPU by default.
    Processes whose threads spin on one core slow each other down tenfold.
    """
    taken: set[int] = set()
    for part in parts:
        if not part:
            raise ValueError(f"{what}: an empty list gives a process nothing; list at least one, or remove the key")
        for place in part:
            if place < 0:
                raise ValueError(f"{what}: {place} is not a position; expected 0 or more. Count from 0")
            if place in taken:
                raise ValueError(f"{what}: {place} is assigned twice; each process needs its own")
            taken.add(place)


class DeployConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that only deploy reads. The default is one server and one rank."""

    server_gpus: Annotated[tuple[Places, ...], tyro.conf.Suppress] = ()
    """GPUs of each server. [[0, 1], [2, 3]]: two servers of two workers each."""
    learner_gpus: Annotated[Places, tyro.conf.Suppress] = ()
    """GPUs of the learner, one rank on each."""
    server_cores: Annotated[tuple[Places, ...], tyro.conf.Suppress] = ()
    """Cores of each server, as positions in the list of cores that colocate may use."""
    learner_cores: Annotated[tuple[Places, ...], tyro.conf.Suppress] = ()
    """Cores of each learner rank, as positions in the same list."""
    sharded: bool = False
    """Whether the learner's ranks shard the policy with FSDP2. false: each rank holds the whole policy."""
    restart: Literal["never", "on-failure"] = "never"
    """Reaction to a server that exits or a learner that fails. never: end the run; on-failure: restart it,
    the learner with --resume."""
    max_restarts: int = 3
    """Maximum number of restarts within an hour, for each server and for the learner. on-failure only; the
    next failure ends the run."""

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
        _refuse_shared("server_cores and learner_cores", (*self.server_cores, *self.learner_cores))
        if self.sharded and len(self.learner_gpus) < 2:
            raise ValueError("sharded = true needs two or more learner_gpus, because accelerate shards only on GPUs")
        if self.max_restarts < 1:
            raise ValueError(
                f'max_restarts = {self.max_restarts} must be at least 1; to disable restarts, set restart = "never"'
            )


class DeployRun(SharedConfig):
    """Configuration of `slipstream colocate`, which ignores the other sections."""

    COMMON = ("model", "run_dir", "deploy.sharded", "deploy.restart")
    deploy: DeployConfig = DeployConfig()
    """Part of the node that each process gets."""
    server: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Section of the server, ignored here."""
    learner: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Section of the learner, ignored here."""
