"""The collective that carries the bytes of a push: the learner is rank 0, the server's workers are ranks 1..N.

    Rendezvous ─▶ connect to the learner's board ─▶ all ranks meet ─▶ form the group ─▶ broadcast* ─▶ close

One collective lives for one epoch; after any error it is closed and a new epoch makes a new one. Forming a group cannot
be interrupted, so it begins only when every rank has come, one that gives up calls the epoch off for all, and a rank
leaves the forming of one that was called off to a thread that nobody waits for.

While bytes travel, `watched` keeps a connection to the learner's board. TCP does not notice that a host has vanished while it only
receives, and within one host NCCL notices nothing. The transfer is aborted when the board says that it was called off, or when the
learner's kernel no longer answers; a learner that only pauses, to write a checkpoint, keeps its transfer.

Torch is imported here and in the files of this folder, never by `import protocol`.
"""

import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import closing, contextmanager, suppress
from typing import Protocol

import msgspec
import torch

from protocol.endpoint import join_address, needs_ipv6, split_endpoint
from protocol.errors import PushError
from protocol.messages import Rendezvous, Transport
from protocol.transports.cuda_ipc import IpcCollective
from protocol.transports.gloo import GlooCollective
from protocol.transports.nccl import NcclCollective, new_unique_id, use_interface_of
from protocol.transports.rendezvous import (
    CALLED_OFF,
    MAX_LINE_BYTES,
    Board,
    EpochStore,
    HostedBoard,
    Question,
    RemoteBoard,
    was_called_off,
)
from protocol.transports.tcp import Call, TcpCollective

ANSWER_TIMEOUT_S = 3.0
"""The learner's board answers at once, from a thread of its own."""
CHECK_INTERVAL_S = 0.05
"""Between two looks whether the epoch still stands."""
JOIN_SLACK_S = 1.0
"""A join waits this much longer than its parts, so that the part that knows what is missing speaks first."""
MAX_STUCK_JOINS = 64
"""A join that hangs in NCCL cannot be ended and keeps a thread until its process ends. One outage may leave one for each
server of a fleet."""
INTERVAL_S = 1.0
"""Between two questions. A push that takes less is not watched."""
DEAD_AFTER_S = 6
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: DEAD_AFTER_S - 1,
    socket.TCP_USER_TIMEOUT: DEAD_AFTER_S * 1000,  # a question that is under way is sent again for minutes, unprobed
}
"""A link that loses one packet in a hundred loses so many in a row once in years of transfers."""


class Collective(Protocol):
    """What a push needs from a transport."""

    device: torch.device
    """Where the tensors must be: the CPU for gloo and tcp, this rank's GPU for nccl and ipc."""
    sends_in_place: bool
    """Whether a tensor is best sent from where it lies, or else out of a few buffers that are used in turn."""

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to copy rank 0's flat uint8 tensor into every other rank's; return what blocks until that is done.

        Several may be under way; every rank begins them, and waits for them, in the same order. On a GPU it comes after all
        that the calling thread's stream has queued, so memory may be filled, read or given back on that stream before; until
        the wait has ended it may not be touched. Raises PushError, here or from the wait, at the deadline, when a peer is
        gone and after `abort`.
        """
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Begin a broadcast and wait for it."""
        ...

    def abort(self) -> None:
        """From any thread: a broadcast that is waited for in another one raises PushError at once, as does every later one."""
        ...

    def close(self) -> None:
        """Leave the group and free what it holds; a peer that waits in a broadcast gets an error."""
        ...


def address_towards(endpoint: str) -> str:
    """Return the local address from which `tcp://host:port` is reached: the one the server's workers can call back."""
    host, port = split_endpoint(endpoint)
    family = socket.AF_INET6 if needs_ipv6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class Meeting:
    """The learner's place where all ranks of an epoch find each other.

    It listens on the one address the server reaches the learner by, on the first free port of `ports` (0: any), until `close`.
    The ranks are told to call `advertise`, where the address is another from where the server stands.
    """

    def __init__(
        self, host: str, timeout_s: float, *, ports: Sequence[int] = (0,), advertise: str | None = None
    ) -> None:
        self._host, self._advertised, self._timeout_s = host, advertise or host, timeout_s
        self._board = HostedBoard(host, ports)

    def rendezvous(self, num_workers: int, transport: Transport) -> Rendezvous:
        """Say where and how the ranks of one new epoch meet. Raises PushError if the transport is not installed."""
        if transport == "nccl":
            use_interface_of(self._host)
        return Rendezvous(
            transport=transport, host=self._advertised, port=self._board.port, world_size=1 + num_workers,
            timeout_s=self._timeout_s, nccl_unique_id=new_unique_id() if transport == "nccl" else None,
            tcp_secret=self._board.callers.expect(1 + num_workers, self._timeout_s) if transport == "tcp" else None,
        )  # fmt: skip

    def host_collective(self, epoch: str, rendezvous: Rendezvous, device: torch.device) -> Collective:
        """Join as rank 0; blocks until every worker has joined. Raises PushError at the deadline or after `call_off`."""
        return _join(epoch, rendezvous, 0, device, self._board)

    def call_off(self, epoch: str, reason: str) -> None:
        """From any thread: every rank, here and at the server, that is joining raises PushError at once."""
        EpochStore(epoch, self._board, self._timeout_s).call_off(reason)

    def close(self) -> None:
        """Stop listening; a worker that is joining gets an error."""
        self._board.close()


def join_collective(epoch: str, rendezvous: Rendezvous, rank: int, device: torch.device) -> Collective:
    """Join the learner's epoch from a worker of the server.

    Raises PushError at the deadline, when a rank has given up, and soon after the learner is gone or stopped.
    """
    answer_timeout_s = min(ANSWER_TIMEOUT_S, rendezvous.timeout_s)
    with closing(RemoteBoard(rendezvous.host, rendezvous.port, answer_timeout_s)) as board:
        return _join(epoch, rendezvous, rank, device, board)


def _join(epoch: str, rendezvous: Rendezvous, rank: int, device: torch.device, board: Board) -> Collective:
    store = EpochStore(epoch, board, rendezvous.timeout_s)
    deadline = time.monotonic() + rendezvous.timeout_s + JOIN_SLACK_S

    def check() -> None:
        store.check_not_called_off()
        if time.monotonic() > deadline:
            raise PushError(
                f"rank {rank} of {rendezvous.world_size} could not form epoch {epoch} within {rendezvous.timeout_s:g} s "
                "(learner.push.timeout_s): a process of another rank is stopped or cannot be reached"
            )

    def meet_and_form() -> Collective:
        store.set(f"rank {rank}", b"")
        store.wait([f"rank {other}" for other in range(rendezvous.world_size)])
        return _form(store, epoch, rank, rendezvous, board, device)

    try:
        if rendezvous.transport == "nccl":
            _check_few_are_stuck()
        return _form_while(check, meet_and_form)
    except PushError as error:
        with suppress(PushError):
            store.call_off(f"rank {rank} gave up: {error}")
        raise


def _form(
    store: EpochStore, epoch: str, rank: int, rendezvous: Rendezvous, board: Board, device: torch.device
) -> Collective:
    world_size, timeout_s = rendezvous.world_size, rendezvous.timeout_s
    if rendezvous.nccl_unique_id is not None:
        use_interface_of(board.own_host)
        return NcclCollective(rendezvous.nccl_unique_id, epoch, rank, world_size, device, timeout_s)
    if rendezvous.tcp_secret is not None:
        lines = board.open_lines(Call(rendezvous.tcp_secret, rank), store.check_not_called_off, timeout_s)
        return TcpCollective(lines, epoch, rank, timeout_s)
    group = GlooCollective(store, epoch, rank, world_size, board.own_host, timeout_s)
    return IpcCollective(group, rank, device) if rendezvous.transport == "ipc" else group


def _form_while(check: Callable[[], None], form: Callable[[], Collective]) -> Collective:
    """Form in a thread of its own, for it may block for long in C, and end at once with what `check` raises."""
    formed: Future[Collective] = Future()

    def run() -> None:
        try:
            collective = form()
        except Exception as error:  # whatever it is belongs to the caller, in the other thread
            traceback.clear_frames(error.__traceback__)  # they would keep the sockets of the failed join open
            with suppress(InvalidStateError):
                formed.set_exception(error)
            return
        try:
            formed.set_result(collective)
        except InvalidStateError:
            collective.close()

    thread = threading.Thread(target=run, name="join", daemon=True)
    thread.start()
    try:
        while not wait([formed], CHECK_INTERVAL_S).done:
            check()
    except PushError:
        if formed.cancel():
            _given_up.add(thread)
            raise
    return formed.result()


_given_up: set[threading.Thread] = set()
"""Threads of joins that nobody waits for any more. Most end soon; those of NCCL may never end."""


def _check_few_are_stuck() -> None:
    _given_up.difference_update([thread for thread in tuple(_given_up) if not thread.is_alive()])
    if len(_given_up) >= MAX_STUCK_JOINS:
        raise PushError(
            f"{len(_given_up)} joins that were given up still hang in NCCL in this process, and nothing can end them; "
            'start the process again, or set learner.push.transport = "gloo"'
        )


@contextmanager
def watched(collective: Collective, rendezvous: Rendezvous, epoch: str) -> Iterator[None]:
    """End the broadcasts soon after the learner has called the epoch off or is gone. Raises PushError that says so."""
    watch = _Watch(collective, (rendezvous.host, rendezvous.port), epoch)
    watch.start()
    try:
        yield
    except PushError as effect:
        if watch.reason is not None:
            raise PushError(f"{watch.reason}; the transfer ended in {effect}") from effect
        raise
    finally:
        watch.end()


class _Watch(threading.Thread):
    def __init__(self, collective: Collective, address: tuple[str, int], epoch: str) -> None:
        super().__init__(name="push-watch", daemon=True)
        self._collective, self._address, self._epoch = collective, address, epoch
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        """Held around the end and the abort: what comes after the end is another transfer."""
        self.reason: str | None = None
        """Why the collective was aborted."""

    def run(self) -> None:
        try:
            while not self._is_over.wait(INTERVAL_S):
                # Ended by the board while it was asked: whether the board is still there, another look tells.
                with suppress(ConnectionResetError, BrokenPipeError):
                    self._look()
        except PushError as called_off:
            self._abort(str(called_off))
        except OSError as error:
            where = join_address(*self._address)
            self._abort(f"the learner at {where} is gone or its host cannot be reached ({error})")
        except msgspec.MsgspecError as error:
            self._abort(f"what answers at {join_address(*self._address)} is not the learner ({error})")

    def _abort(self, reason: str) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self.reason = reason
                self._collective.abort()

    def _look(self) -> None:
        """Ask until the transfer is over or the board ends the connection, as it does with those that are silent for long.

        Raises PushError once the epoch is called off.
        """
        question = msgspec.json.encode(Question(self._epoch, CALLED_OFF)) + b"\n"
        with socket.create_connection(self._address, DEAD_AFTER_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            while not self._is_over.is_set():
                connection.sendall(question)
                answer = self._answer(connection)
                if answer is None:
                    return
                reason = msgspec.json.decode(answer, type=bytes | None)
                if reason is not None:
                    raise was_called_off(self._epoch, reason)
                self._is_over.wait(INTERVAL_S)

    def _answer(self, connection: socket.socket) -> bytes | None:
        """Wait for one line, for as long as the transfer goes on; None where there is none to come."""
        events = select.poll()
        events.register(connection, select.POLLIN)
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
            if self._is_over.is_set():
                return None
            if events.poll(INTERVAL_S * 1000):
                part = connection.recv(MAX_LINE_BYTES)
                if not part:
                    return None
                line += part
        return line

    def end(self) -> None:
        with self._lock:
            self._is_over.set()
