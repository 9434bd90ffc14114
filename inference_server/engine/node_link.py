"""Link between the nodes of one server (server.nnodes), so that all of them start and end an engine together.

    node 0: ServerNodes                        every other node: NodeLink, in worker_node.py
    gather, before each engine  ◀── NodeHello ───  connects until it is admitted or refused
                                ─── EngineStart ─▶ runs its share of vLLM's workers
    release, or a closed connection: the engine is over on all nodes, which then connect for the next one
    end                         ─── ServerEnd ───▶ exits

vLLM itself does not tell a node that the others are gone: their workers would wait for it forever.
Invariant: a connection lives as long as one engine. Keepalive probes end it when a host falls silent.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from inference_server.config import ServerRun
from inference_server.engine.installed_vllm import installed_version
from inference_server.engine.interface import EngineDead
from protocol.config_keys import flatten
from protocol.doctor import package_version
from protocol.endpoint import is_loopback, join_address, needs_ipv6, split_endpoint
from protocol.errors import ConfigError
from protocol.line_socket import keep_alive, send_line
from protocol.messages import ModelFingerprint

log = logging.getLogger(__name__)

TICK_S = 0.5
HELLO_TIMEOUT_S = 5.0
MAX_LINE_BYTES = 1 << 16
PER_NODE = {"server.node_rank", "server.cpu_cores", "server.api_key_file"}
"""Keys that may differ between the nodes of a server."""


class NodeHello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First line of a node: its rank, and what must be the same on all nodes."""

    node_rank: int
    settings: dict[str, Any]


class NodeRefused(msgspec.Struct, tag=True, frozen=True):
    """Answer to a node that does not fit."""

    reason: str


class EngineStart(msgspec.Struct, tag=True, frozen=True):
    """Request to start the node's workers, which meet at this port of node 0."""

    master_port: int


class ServerEnd(msgspec.Struct, tag=True, frozen=True):
    """Notice that the server has ended in order."""


Line = NodeHello | NodeRefused | EngineStart | ServerEnd


def settings_of(run: ServerRun, model: ModelFingerprint) -> dict[str, Any]:
    """Return what must be the same on all nodes of a server, by key."""
    keys = flatten({"server": msgspec.to_builtins(run.server), "model": msgspec.to_builtins(model)})
    keys |= {"dtype": run.dtype, "head_dtype": run.head_dtype, "seed": run.seed}
    keys |= {"learner.lora.rank": run.lora_rank, "learner.routing_replay": run.returns_experts}
    keys |= {"slipstream-rl": package_version(), "vllm": installed_version().number}
    kept = {key: value for key, value in keys.items() if key not in PER_NODE}
    return msgspec.json.decode(msgspec.json.encode(kept))  # as they arrive from another node


class ServerNodes:
    """Node 0's side of the link."""

    def __init__(self, run: ServerRun, model: ModelFingerprint) -> None:
        """Listen at server.master_port. Raises ConfigError if that is impossible, or only this node reaches it."""
        server = run.server
        self._server, self._settings = server, settings_of(run, model)
        self._connections: dict[int, socket.socket] = {}
        self._is_closed = False
        try:
            self._listener = _listen(server.master_addr, server.master_port)
        except OSError as error:
            raise ConfigError(
                f"server.master_addr = {server.master_addr!r}: node 0 cannot listen at "
                f"{join_address(server.master_addr, server.master_port)} ({error.strerror or error}); set it to an "
                "address of node 0, and server.master_port to a free port"
            ) from error
        if (problem := self._why_unreachable(run)) is not None:
            self._listener.close()
            raise ConfigError(problem)
        self._listener.settimeout(TICK_S)

    @property
    def address(self) -> str:
        """IP address of node 0."""
        return str(self._listener.getsockname()[0])

    def _why_unreachable(self, run: ServerRun) -> str | None:
        """Return why other nodes cannot reach node 0 or the learner. All may be on one machine, for a trial."""
        nnodes, master_addr = run.server.nnodes, run.server.master_addr
        if is_loopback(master_addr):
            return None
        if is_loopback(self.address):
            return (
                f"server.master_addr = {master_addr!r} is {self.address} on node 0 (see /etc/hosts), which other nodes "
                "cannot reach; set it to the IP address of node 0, on all nodes"
            )
        if is_loopback(split_endpoint(run.endpoint)[0]):
            return (
                f"server.nnodes = {nnodes} with endpoint = {run.endpoint!r}: the learner would send weights from an "
                "address that other nodes cannot reach; set `endpoint` to the address of node 0, for the learner too"
            )
        return None

    def gather(self) -> int:
        """Wait for all other nodes, let them start an engine, and return the port at which workers meet.

        Raises:
            ConfigError: A node did not connect in time.
            EngineDead: The server ends meanwhile.
        """
        give_up_at = time.monotonic() + self._server.start_timeout_s
        where = join_address(self._server.master_addr, self._server.master_port)
        log.info("waiting for %d other node(s) of this server at %s", self._server.nnodes - 1, where)
        while missing := self._missing():
            if self._is_closed:
                raise EngineDead("the server ended before all of its nodes had connected")
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"server.nnodes = {self._server.nnodes}: node {missing[0]} did not connect to {where} within "
                    f"{self._server.start_timeout_s} s (server.start_timeout_s); start the same command there with "
                    f"--server.node-rank {missing[0]}"
                )
            with suppress(OSError):  # a timeout, or `end` has closed the listener
                connection, (host, *_) = self._listener.accept()
                self._admit(connection, host, missing)
        port = _free_port(self._server.master_addr)
        for connection in self._connections.values():
            send_line(connection, EngineStart(port))
        return port

    def lost(self) -> str | None:
        """Return which node has ended its part of the engine, or None."""
        for rank, connection in sorted(self._connections.items()):
            if not _is_open(connection):
                return f"node {rank} of this server has ended its part of the engine, or is unreachable; see its log"
        return None

    @contextmanager
    def watched(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` when a node is lost in this context, in which an engine starts."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(TICK_S):
                if self.lost() is not None:
                    stop()

        watcher = threading.Thread(target=watch, name="node-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def release(self) -> None:
        """End the engine on all other nodes."""
        while self._connections:
            _, connection = self._connections.popitem()
            connection.close()

    def end(self) -> None:
        """End the other nodes, and stop listening. A running `gather` raises."""
        self._is_closed = True
        for connection in self._connections.values():
            send_line(connection, ServerEnd())
        self.release()
        self._listener.close()

    def _missing(self) -> list[int]:
        for rank in [rank for rank, connection in self._connections.items() if not _is_open(connection)]:
            self._connections.pop(rank).close()
        return [rank for rank in range(1, self._server.nnodes) if rank not in self._connections]

    def _admit(self, connection: socket.socket, host: str, missing: list[int]) -> None:
        connection.settimeout(HELLO_TIMEOUT_S)
        hello = _read(connection)
        if not isinstance(hello, NodeHello):
            connection.close()  # not a node of a server
            return
        if (reason := self._why_not(hello, missing)) is not None:
            log.warning("refused node %d at %s: %s", hello.node_rank, host, reason)
            send_line(connection, NodeRefused(reason))
            connection.close()
            return
        keep_alive(connection)
        connection.setblocking(False)
        self._connections[hello.node_rank] = connection
        log.info("node %d connected from %s", hello.node_rank, host)

    def _why_not(self, hello: NodeHello, missing: list[int]) -> str | None:
        mine, theirs = self._settings, hello.settings
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return (
                    f"{key} is {theirs.get(key)!r} on node {hello.node_rank} and {mine.get(key)!r} on node 0; start "
                    "all nodes with the same config and versions"
                )
        if hello.node_rank not in missing:
            return f"server.node_rank = {hello.node_rank} is taken, or not below server.nnodes; give each node its own"
        return None


class NodeLink:
    """Another node's connection to node 0, for one engine."""

    def __init__(self, connection: socket.socket, start: EngineStart) -> None:
        self._connection, self.start = connection, start

    @property
    def own_address(self) -> str:
        return str(self._connection.getsockname()[0])

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the engine is over."""
        return self._connection.fileno()

    @property
    def server_has_ended(self) -> bool:
        """Read the line that ended the engine: whether the server ended with it."""
        return isinstance(_read(self._connection), ServerEnd)

    def close(self) -> None:
        self._connection.close()


def join_node_0(run: ServerRun, model: ModelFingerprint) -> NodeLink | None:
    """Wait until node 0 starts an engine, or return None if the server has ended.

    Raises:
        ConfigError: Node 0 refused this node, or did not answer within server.start_timeout_s.
    """
    server = run.server
    where = join_address(server.master_addr, server.master_port)
    hello = NodeHello(node_rank=server.node_rank, settings=settings_of(run, model))
    give_up_at = time.monotonic() + server.start_timeout_s
    reason = "no answer"
    while (left_s := give_up_at - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((server.master_addr, server.master_port), min(left_s, 10.0))
        except OSError as error:  # node 0 has not started yet, or starts again
            reason = error.strerror or str(error)
            time.sleep(TICK_S)
            continue
        connection.settimeout(left_s)
        keep_alive(connection)
        send_line(connection, hello)
        match _read(connection):
            case EngineStart() as start:
                connection.settimeout(HELLO_TIMEOUT_S)
                return NodeLink(connection, start)
            case NodeRefused(why):
                connection.close()
                raise ConfigError(f"node 0 at {where} refused this node: {why}")
            case ServerEnd():
                connection.close()
                return None
        reason = "it closed the connection, or waits for other nodes"
        connection.close()
        time.sleep(TICK_S)
    raise ConfigError(
        f"server.node_rank = {server.node_rank}: node 0 at {where} did not start an engine within "
        f"{server.start_timeout_s} s (server.start_timeout_s): {reason}. Start the same command there with "
        "--server.node-rank 0, and check server.master_addr and server.master_port"
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if needs_ipv6(host) else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _free_port(host: str) -> int:
    with _listen(host, 0) as probe:
        return int(probe.getsockname()[1])


def _is_open(connection: socket.socket) -> bool:
    """Return whether the peer of a non-blocking connection still holds it."""
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _read(connection: socket.socket) -> Line | None:
    """Return the next line, or None if the connection has ended, is too slow, or sends anything else."""
    received = b""
    try:
        while not received.endswith(b"\n"):
            if len(received) > MAX_LINE_BYTES or not (part := connection.recv(MAX_LINE_BYTES)):
                return None
            received += part
        return msgspec.json.decode(received, type=Line)
    except (OSError, msgspec.DecodeError):
        return None
