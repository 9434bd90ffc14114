"""Processes on the nodes of a Ray cluster, one in each bundle of a placement group.

    RemoteProcess (driver) ── run, signal ──▶ Agent (an actor in a bundle) ─▶ child process
          ▲                                     │  ▲
          └──────── lines, exit code ───────────┘  Ray starts a lost agent again, on another node

An agent lives as long as the run, and runs one process after another. The supervisor starts a lost process
again, which waits until Ray has started its agent again.
Invariant: an agent that dies takes its child process along, so a lost node computes nothing for the run.
"""

import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.ray_placement import BundleLocation, RemoteCommand
from deploy.supervisor import GRACE_S, POLL_S, copy_output, start_process
from protocol.errors import ConfigError, DeadlineExceeded, SlipstreamError
from protocol.installation import module_command

log = logging.getLogger(__name__)

PORTS = range(20_000, 30_000)
"""Ports for servers and for the ranks' rendezvous: below those that the kernel gives to connections."""
VISIBLE_WITHIN_S = 60.0
"""Seconds after which a new file on network storage is visible on every node."""
NOTICE_AFTER_S = 10.0
LOST = 1
"""Exit code of a process whose agent was lost."""
NO_CODE = 2
"""Exit code of a process that could not be started."""


class Agent:
    """Actor that runs the processes of one bundle, one after another. Its methods run concurrently."""

    def __init__(self) -> None:
        self._run_id = 0
        self._popen: subprocess.Popen[str] | None = None
        self._early: dict[int, int] = {}
        """Signals to processes that have not started."""
        self._lock = threading.Lock()

    @ray.method(max_task_retries=-1)  # while Ray starts this agent again
    def host(self) -> BundleLocation:
        """Return where this agent is, with ports that are free now."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "") if ray.get_gpu_ids() else ""
        return BundleLocation(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            ports=free_ports(),
            gpus=tuple(gpu for gpu in gpus.split(",") if gpu),
        )

    @ray.method(num_returns="streaming")
    def run(self, run_id: int, command: RemoteCommand) -> Iterator[str | int]:
        """Run a process. Yield its lines, several at once, and its exit code last."""
        self.signal(self._run_id, signal.SIGKILL)  # of a driver that lost the connection
        try:
            enter(command)
        except ConfigError as error:
            yield f"error: {error}\n"
            yield NO_CODE
            return
        popen = None
        with self._lock:
            if run_id not in self._early:
                program = (*module_command(command.module), *command.arguments)
                popen = start_process(program, command.environment, signal.SIGKILL)
                self._run_id, self._popen = run_id, popen
        if popen is None:
            yield -self._early[run_id]
            return
        yield from output_of(popen)
        yield popen.returncode

    def signal(self, run_id: int, number: int) -> None:
        """Send a signal to a process. One that waits for its files then never starts.

        SIGKILL goes to the whole session of the process.
        """
        with self._lock:
            if self._run_id < run_id:
                self._early[run_id] = number
            popen = self._popen if self._run_id == run_id else None
        if popen is None or popen.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(popen.pid, number)
        else:
            popen.send_signal(number)


def enter(command: RemoteCommand) -> None:
    """Change to the directory of a command.

    Raises:
        ConfigError: This node does not see it, or a file that the process needs.
    """
    here = f"on node {ray.util.get_node_ip_address()}"
    remedy = "start in a directory, and set run_dir, on storage that all nodes see at the same path"
    try:
        os.chdir(command.directory)
    except OSError as error:
        raise ConfigError(f"{command.directory} cannot be entered {here} ({error.strerror}); {remedy}") from error
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    for path, start in command.needed_files.items():
        while not _begins(Path(path), start):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{path} {here} is not the file of the driver; {remedy}, or set "
                    "deploy.ray.rank_0_with_driver = true, and keys to a directory that all nodes see"
                )
            time.sleep(POLL_S)


def _begins(path: Path, start: str) -> bool:
    try:
        return path.read_text("utf-8").startswith(start)
    except OSError:
        return False


def output_of(popen: "subprocess.Popen[str]") -> Iterator[str]:
    """Yield the lines of a process until it has exited, several at once."""
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            lines.put(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while popen.poll() is None:
        if text := _pop_all(lines):
            yield text
    reader.join(GRACE_S)  # children of the process may keep the pipe open
    yield _pop_all(lines)


def _pop_all(lines: "SimpleQueue[str]") -> str:
    """Return all lines that are there, after a wait of POLL_S for the first."""
    text = ""
    with suppress(Empty):
        text = lines.get(timeout=POLL_S)
        while True:
            text += lines.get_nowait()
    return text


def free_ports() -> tuple[int, int]:
    """Return two ports that are free now."""
    while True:
        first, second = random.sample(PORTS, 2)
        with suppress(OSError), socket.create_server(("", first)), socket.create_server(("", second)):
            return first, second


class RemoteProcess:
    """A process in a bundle, whose output is copied to the console, prefixed, and to a file."""

    def __init__(
        self,
        name: str,
        agent: Any,
        prepare: Callable[[BundleLocation], RemoteCommand],
        log_file: Path,
        start_timeout_s: float,
    ) -> None:
        self.name = name
        self.returncode: int | None = None
        self._agent, self._prepare, self._start_timeout_s = agent, prepare, start_timeout_s
        self._run_id = time.monotonic_ns()
        self._is_running = False
        self._lock, self._has_ended = threading.RLock(), threading.Event()  # a signal handler may interrupt `signal`
        threading.Thread(target=copy_output, args=(name, self._lines(), log_file), daemon=True).start()

    def signal(self, number: int) -> None:
        """Send a signal. A process that does not have a node yet ends at once."""
        with self._lock:
            if self.returncode is None and self._is_running:
                self._agent.signal.remote(self._run_id, number)
            elif self.returncode is None:
                self._end(-number)

    def wait(self, give_up_at: float) -> None:
        """Wait for the process and its output; at `give_up_at`, kill its whole session."""
        if not self._has_ended.wait(max(0.0, give_up_at - time.monotonic())):
            self.signal(signal.SIGKILL)
            self._has_ended.wait(GRACE_S)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._has_ended.set()

    def _lines(self) -> Iterator[str]:
        """Start the process, and yield its lines until it ends or is lost."""
        code = LOST
        try:
            host = self._host()
            yield f"on node {host.address} ({host.node[:8]})\n"
            command = self._prepare(host)
            with self._lock:
                self._is_running = self.returncode is None
            if self._is_running:
                for item in self._agent.run.remote(self._run_id, command):
                    output = ray.get(item)
                    if isinstance(output, int):
                        code = output
                    else:
                        yield from output.splitlines(keepends=True)
        except SlipstreamError as error:
            yield f"error: {error}\n"
        except RayError as error:
            yield f"the connection to its node is lost: {' '.join(str(error).split())}\n"
        finally:
            with self._lock:
                if self.returncode is None:
                    self._end(code)

    def _host(self) -> BundleLocation:
        """Return where the agent is.

        Raises:
            DeadlineExceeded: It has no node within `start_timeout_s`.
        """
        try:
            return ray.get(self._agent.host.remote(), timeout=self._start_timeout_s)
        except GetTimeoutError as error:
            raise no_room(self.name, self._start_timeout_s) from error


def no_room(what: str, timeout_s: float) -> DeadlineExceeded:
    free = {name: count for name, count in ray.available_resources().items() if name in ("CPU", "GPU")}
    return DeadlineExceeded(
        f"the cluster has no room for {what} after {timeout_s:g} s (free: {free}); add nodes, or raise "
        "deploy.ray.start_timeout_s"
    )


def connect() -> str:
    """Connect to the cluster of RAY_ADDRESS, or of this machine; return the address of this node.

    Raises:
        ConfigError: There is none.
    """
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster was found ({error}); start one with `ray start --head`, or set RAY_ADDRESS"
        ) from error
    return ray.util.get_node_ip_address()


def start_agents(bundles: Sequence[dict[str, float]], timeout_s: float) -> list[Any]:
    """Reserve all bundles, close together; return an agent in each.

    Raises:
        DeadlineExceeded: The cluster has no room for them within `timeout_s`.
    """
    group = placement_group(list(bundles), strategy="PACK")
    if not group.wait(min(NOTICE_AFTER_S, timeout_s)):
        log.warning("waiting for room on the cluster (bundles: %s)", bundles)
        if not group.wait(max(0.0, timeout_s - NOTICE_AFTER_S)):
            raise no_room(f"the bundles {bundles}", timeout_s)
    return [
        ray.remote(Agent)
        .options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=-1, max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
        for index, bundle in enumerate(bundles)
    ]  # fmt: skip
