"""What runs where on a Ray cluster: the resources of each bundle, and the command of each server and rank.

    [deploy.ray] ─▶ bundles ─▶ Ray ─▶ BundleLocation ─▶ RemoteCommand: arguments, and the environment of torchrun

    every server ─ its endpoint ─▶ RUN_DIR/servers.txt ─▶ learner (endpoints_from)

ray.py brings these together with ray_cluster.py. Invariant: this module does not import Ray.
"""

import fcntl
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import msgspec

from deploy.arguments import Launch
from deploy.placement import RankPosition, RayConfig
from inference_server.config import ServerRun
from protocol.channel.keys import make_keys
from protocol.config import DEFAULT_ENDPOINT
from protocol.endpoint import join_address
from protocol.errors import ConfigError, DeadlineExceeded


class BundleLocation(NamedTuple):
    """Node, ports and GPUs that Ray gave to a bundle."""

    node: str
    address: str
    ports: tuple[int, int]
    """Ports of the node that are free."""
    gpus: tuple[str, ...]
    """GPUs of the bundle, as in CUDA_VISIBLE_DEVICES."""


class RemoteCommand(NamedTuple):
    """One of Slipstream's modules to run in a bundle."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    """Working directory of the driver, which the node must see."""
    needed_files: Mapping[str, str] = {}
    """Files that the node must see, with the text that each begins with."""


def bundles(config: RayConfig, run: ServerRun, driver_address: str) -> list[dict[str, float]]:
    """Return the resources of each bundle, first of the ranks, then of the servers."""

    def bundle(num_gpus: int) -> dict[str, float]:
        return {"CPU": float(config.cpus_per_process)} | ({"GPU": float(num_gpus)} if config.use_gpus else {})

    on_driver = {f"node:{driver_address}": 0.001} if config.rank_0_with_driver else {}  # Ray's resource of each node
    ranks = [bundle(1) | on_driver, *[bundle(1)] * (config.ranks - 1)]
    return ranks + [bundle(run.server.num_workers)] * config.servers


def names(kind: str, count: int) -> list[str]:
    return [f"{kind}{i}" for i in range(count)] if count > 1 else [kind]


def check_launch(launch: Launch) -> None:
    """Raise ConfigError if the config names addresses of servers, which only Ray knows, or contradicts itself."""
    run = launch.learner_run
    addresses = {
        "endpoint": run.endpoint if run.endpoint != DEFAULT_ENDPOINT else None,
        "endpoints": list(run.endpoints) or None,
        "endpoints_from": run.endpoints_from,
    }
    for key, value in addresses.items():
        if value is not None:
            raise ConfigError(
                f"{key} = {value!r}, but Ray chooses the nodes of the servers; remove it, and set deploy.ray.servers "
                "to the number of servers"
            )
    if launch.config.reference_model is not None:
        raise ConfigError(
            f"deploy.reference_model = {launch.config.reference_model!r}, but only colocate starts a reference's "
            "server; remove it, and start that server yourself"
        )
    if (num_nodes := launch.server_run.server.nnodes) > 1:
        raise ConfigError(
            f"server.nnodes = {num_nodes}, but under Ray all workers of a server are on one node; remove it"
        )


class ServerList:
    """File with the endpoint of each server, which the learner reads again every few seconds.

    It belongs to this driver until the process ends.
    """

    def __init__(self, run_dir: Path) -> None:
        """Create the file, without servers. Raises ConfigError if another driver has one."""
        self.path = run_dir / "servers.txt"
        lock_file = os.open(run_dir / "logs" / "servers.lock", os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run_dir = {run_dir} is in use by another `slipstream ray`; stop it, or choose another directory with "
                "--run-dir"
            ) from error
        self.header = f"# Servers of the driver {secrets.token_hex(8)}.\n"
        """First line. A node that sees it, sees the driver's run directory."""
        self._hosts: dict[str, BundleLocation] = {}
        self._lock, self._has_any = threading.Lock(), threading.Event()
        self._write()

    def put(self, name: str, host: BundleLocation) -> None:
        """Set the location of a server, which may have moved."""
        with self._lock:
            self._hosts[name] = host
            self._write()
        self._has_any.set()

    def first(self, timeout_s: float) -> BundleLocation:
        """Wait until a server has a node; return the location of the first one.

        Raises:
            DeadlineExceeded: None has one within `timeout_s`.
        """
        if not self._has_any.wait(timeout_s):
            raise DeadlineExceeded(
                f"no server has a node after {timeout_s:g} s (deploy.ray.start_timeout_s); add nodes with free GPUs, "
                "or raise that key"
            )
        with self._lock:
            return self._hosts[min(self._hosts)]

    def _write(self) -> None:
        endpoints = "".join(f"{endpoint_of(host)}\n" for _, host in sorted(self._hosts.items()))
        new = self.path.with_suffix(".new")
        new.write_text(self.header + endpoints)
        os.replace(new, self.path)


def endpoint_of(host: BundleLocation) -> str:
    return f"tcp://{join_address(host.address, host.ports[0])}"


class Commands(msgspec.Struct, frozen=True, kw_only=True):
    """Commands of the servers and ranks of a run."""

    launch: Launch
    servers: ServerList
    directory: str
    keys: str | None
    """Directory of the CURVE keys. None: the run is insecure."""
    api_key: str
    """Key of the servers' HTTP side, if it is open to other nodes."""
    server_module: str = "inference_server"

    @property
    def _evaluates(self) -> bool:
        """True if the learner evaluates over HTTP at a server of the run."""
        evaluation = self.launch.learner_run.learner.evaluation
        return bool(evaluation.every_steps) and evaluation.url is None

    def _api_key(self, variable: str) -> dict[str, str]:
        """Return the variable with the key of the HTTP side, if evaluations need it and the config has none."""
        is_needed = self._evaluates and self.launch.server_run.server.api_key_file is None
        return {variable: self.api_key} if is_needed else {}

    @property
    def _keys(self) -> tuple[str, ...]:
        return ("--keys", self.keys) if self.keys is not None else ()

    @property
    def _created_keys(self) -> dict[str, str]:
        """Return the public key in the run directory, unless the config names keys, which may differ by node."""
        if self.keys is None or self.launch.learner_run.keys is not None:
            return {}
        public = Path(self.keys) / "server.pub"
        return {str(public): public.read_text("utf-8")} if public.exists() else {}

    def server(self, name: str, host: BundleLocation) -> RemoteCommand:
        """Return the command of a server, and list its endpoint."""
        self.servers.put(name, host)
        has_http = self.launch.server_run.server.http_port != 0
        http: tuple[str, ...] = ("--server.http-port", str(host.ports[1])) if has_http else ()
        http += ("--server.http-host", host.address) if self._evaluates else ()
        return RemoteCommand(
            module=self.server_module,
            arguments=(*self.launch.server, "--endpoint", endpoint_of(host), *http, *self._keys),
            environment=self.launch.environment | self._api_key("VLLM_API_KEY"),
            directory=self.directory,
            needed_files=self._created_keys,
        )

    def rank(self, rank: int, hosts: Sequence[BundleLocation], server: BundleLocation, *, again: bool) -> RemoteCommand:
        """Return the command of a rank. All ranks of a start need the same `server`, which evaluates."""
        arguments = [*self.launch.learner, "--endpoints-from", f"file:{self.servers.path}", *self._keys]
        if self._evaluates:
            arguments += ["--learner.evaluation.url", f"http://{join_address(server.address, server.ports[1])}/v1"]
        return RemoteCommand(
            module="learner",
            arguments=(*arguments, *self.launch.resume_switch(again=again)),
            environment=self.launch.environment | self._api_key("EVALUATION_API_KEY") | rank_environment(rank, hosts),
            directory=self.directory,
            needed_files={str(self.servers.path): f"{self.servers.header}tcp://"} if rank == 0 else {},
        )


class RankRendezvous:
    """Meeting of the ranks of one start, at which each learns where the others and the first server are."""

    def __init__(self, num_ranks: int, servers: ServerList) -> None:
        self._servers = servers
        self._hosts: list[Future[BundleLocation]] = [Future() for _ in range(num_ranks)]
        self._lock = threading.Lock()
        self._first: BundleLocation | None = None

    def join(self, rank: int, host: BundleLocation, timeout_s: float) -> list[BundleLocation]:
        """Return where all ranks are. Blocks until each has a node.

        Raises:
            DeadlineExceeded: One has none within `timeout_s`.
        """
        self._hosts[rank].set_result(host)
        try:
            return [other.result(timeout_s) for other in self._hosts]
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"another rank has no node after {timeout_s:g} s (deploy.ray.start_timeout_s); add nodes with free "
                "GPUs, or raise that key"
            ) from error

    def first_server(self, timeout_s: float) -> BundleLocation:
        """Wait until a server has a node; return the same one to all ranks, also if the list changes meanwhile.

        Raises:
            DeadlineExceeded: None has one within `timeout_s`.
        """
        found = self._servers.first(timeout_s)
        with self._lock:
            self._first = self._first or found
            return self._first


def rank_environment(bundle: int, hosts: Sequence[BundleLocation]) -> dict[str, str]:
    """Return what torchrun would set for the rank of a bundle. The ranks of a node see the GPUs of all of them.

    Ranks are numbered node by node, also if Ray mixes the bundles: learner.sharding = "hybrid" shards the policy over
    successive ranks. Rank 0 is that of the first bundle.
    """
    if len(hosts) == 1:
        return {}
    nodes = [host.node for host in hosts]
    order = sorted(range(len(hosts)), key=lambda other: nodes.index(nodes[other]))
    on_node = [other for other in order if nodes[other] == nodes[bundle]]
    gpus = [gpu for other in on_node for gpu in hosts[other].gpus]
    position = RankPosition(
        rank=order.index(bundle), num_ranks=len(hosts), local_rank=on_node.index(bundle), local_num_ranks=len(on_node)
    )  # fmt: skip
    address, port = hosts[0].address, hosts[0].ports[0]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} | position.environment(address, port, on_gpu=bool(gpus))


def keys_of(launch: Launch) -> str | None:
    """Return the directory of the run's keys, which is created if the config names none. None: insecure.

    Raises:
        ConfigError: The directory cannot be created.
    """
    run = launch.learner_run
    if run.keys is not None or run.insecure:
        return str(Path(run.keys).absolute()) if run.keys is not None else None
    directory = Path(run.run_dir).absolute() / "keys"
    if not directory.exists():
        make_keys(directory)
    return str(directory)
