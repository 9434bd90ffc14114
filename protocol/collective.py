"""The collective that carries the bytes of a push: the learner is rank 0, the server's workers are ranks 1..N.

    Rendezvous ─▶ connect to the learner's store ─▶ all ranks meet ─▶ form the group ─▶ broadcast* ─▶ close

One collective lives for one epoch; after any error it is closed and a new epoch makes a new one. Forming a group cannot
be interrupted, so it begins only when every rank has come, one that gives up calls the epoch off for all, and the learner
leaves the forming of one that was called off to a thread that nobody waits for. Torch is imported here and in the files
beside this one, never by `import protocol`.
"""

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Protocol
from urllib.parse import urlsplit

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from protocol.errors import PushFailed
from protocol.gloo_collective import GlooCollective
from protocol.ipc_collective import IpcCollective
from protocol.messages import Rendezvous, Transport
from protocol.nccl_collective import NcclCollective, new_unique_id

MEETING_POLL_S = 0.02
STORE_TIMEOUT_S = 4.0
"""The learner's store answers at once, from a thread of its own: if it does not, the learner is gone, or torch has lost
the connection (one in 50 hangs until its deadline). Torch goes on trying for up to twice this time."""
JOIN_SLACK_S = 1.0
"""A join waits this much longer than its parts, so that the part that knows what is missing speaks first."""

_CALLED_OFF = "called off"


class Collective(Protocol):
    """What a push needs from a transport."""

    device: torch.device
    """Where the tensors must be: the CPU for gloo, this rank's GPU for nccl and ipc."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's flat uint8 tensor into every other rank's; blocks.

        Raises PushFailed at the deadline, when a peer is gone and after `abort`.
        """
        ...

    def abort(self) -> None:
        """From any thread: a broadcast that waits in another one raises PushFailed at once, as does every later one."""
        ...

    def close(self) -> None:
        """Leave the group and free what it holds; a peer that waits in a broadcast gets an error."""
        ...


def address_towards(endpoint: str) -> str:
    """Return the local address from which `tcp://host:port` is reached: the one the server's workers can call back."""
    url = urlsplit(endpoint)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname or "127.0.0.1", url.port or 9))
        return probe.getsockname()[0]


class Meeting:
    """The learner's listening store, in which all ranks of an epoch find each other.

    It listens on the one address the server reaches the learner by, on a free port, until `close`.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        self._joining: dict[str, Future[Collective]] = {}
        """By epoch."""
        listener = socket.create_server((host, 0))
        self._port = listener.getsockname()[1]
        # The store takes over the bound socket: without this it would listen on every interface.
        self._store: TCPStore | None = TCPStore(
            host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s), use_libuv=True,
        )  # fmt: skip

    def rendezvous(self, num_workers: int, transport: Transport) -> Rendezvous:
        """Say where and how the ranks of one new epoch meet. Raises PushFailed if the transport is not installed."""
        return Rendezvous(
            transport=transport, host=self._host, port=self._port, world_size=1 + num_workers,
            timeout_s=self._timeout_s, nccl_unique_id=new_unique_id() if transport == "nccl" else None,
        )  # fmt: skip

    def host_collective(self, epoch: str, rendezvous: Rendezvous, device: torch.device) -> Collective:
        """Join as rank 0; blocks until every worker has joined. Raises PushFailed at the deadline or after `call_off`."""
        self._joining[epoch] = Future()
        try:
            return _join(epoch, rendezvous, 0, device, lambda: (self._open_store(), self._host), self._joining[epoch])
        finally:
            del self._joining[epoch]

    def call_off(self, epoch: str, reason: str) -> None:
        """From any thread: every rank, here and at the server, that waits for others to join raises PushFailed at once.

        One at the server that is already connecting to them ends when they are gone, or at its deadline.
        """
        if joining := self._joining.get(epoch):
            with contextlib.suppress(InvalidStateError):
                joining.set_exception(PushFailed(f"epoch {epoch} was called off: {reason}"))
        PrefixStore(epoch, self._open_store()).set(_CALLED_OFF, reason)

    def close(self) -> None:
        """Stop listening; a worker that waits to join gets an error."""
        self._store = None  # its destructor ends the listening thread, once no collective uses it

    def _open_store(self) -> TCPStore:
        if self._store is None:
            raise PushFailed("the learner's rendezvous is closed")
        return self._store


def join_collective(epoch: str, rendezvous: Rendezvous, rank: int, device: torch.device) -> Collective:
    """Join the learner's epoch from a worker of the server. Raises PushFailed at the deadline."""
    return _join(epoch, rendezvous, rank, device, lambda: _connect(rendezvous), Future())


def _connect(rendezvous: Rendezvous) -> tuple[TCPStore, str]:
    """Return the learner's store and the own address that faces it."""
    address = (rendezvous.host, rendezvous.port)
    answers_s = min(STORE_TIMEOUT_S, rendezvous.timeout_s)
    try:
        with socket.create_connection(address, answers_s) as probe:
            own_host = probe.getsockname()[0]
        store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=answers_s))
        store.set_timeout(timedelta(seconds=rendezvous.timeout_s))
        return store, own_host
    except (OSError, RuntimeError, ValueError) as error:
        raise PushFailed(f"cannot reach the learner's rendezvous {address[0]}:{address[1]}: {error}") from error


def _join(
    epoch: str,
    rendezvous: Rendezvous,
    rank: int,
    device: torch.device,
    connect: Callable[[], tuple[Store, str]],
    joined: "Future[Collective]",
) -> Collective:
    def join() -> Collective:
        store, own_host = connect()
        store = PrefixStore(epoch, store)
        try:
            _meet(store, epoch, rank, rendezvous)
            return _form(store, epoch, rank, rendezvous, own_host, device)
        except PushFailed as error:
            with contextlib.suppress(RuntimeError):
                store.set(_CALLED_OFF, f"rank {rank} gave up: {error}")
            raise
        except RuntimeError as error:
            raise PushFailed(f"the learner's rendezvous was lost while rank {rank} joined {epoch}: {error}") from error

    try:
        return _within(rendezvous.timeout_s + JOIN_SLACK_S, join, joined, discard=lambda collective: collective.close())
    except TimeoutError as error:
        raise PushFailed(
            f"rank {rank} of {rendezvous.world_size} could not form epoch {epoch} within {rendezvous.timeout_s:g} s "
            "(learner.push.timeout_s): a process of another rank is stopped or cannot be reached"
        ) from error


def _meet(store: Store, epoch: str, rank: int, rendezvous: Rendezvous) -> None:
    """Wait until every rank is there. Raises PushFailed at the deadline or when the epoch is called off."""
    deadline = time.monotonic() + rendezvous.timeout_s
    store.set(f"rank {rank}", "")
    missing = list(range(rendezvous.world_size))
    while missing := [other for other in missing if not store.check([f"rank {other}"])]:
        if time.monotonic() > deadline:
            raise PushFailed(
                f"of the {rendezvous.world_size} ranks of epoch {epoch} these did not come within "
                f"{rendezvous.timeout_s:g} s (learner.push.timeout_s): {missing}"
            )
        _check_not_called_off(store, epoch)
        time.sleep(MEETING_POLL_S)
    _check_not_called_off(store, epoch)


def _check_not_called_off(store: Store, epoch: str) -> None:
    if store.check([_CALLED_OFF]):
        raise PushFailed(f"epoch {epoch} was called off: {store.get(_CALLED_OFF).decode()}")


def _form(
    store: Store, epoch: str, rank: int, rendezvous: Rendezvous, own_host: str, device: torch.device
) -> Collective:
    world_size, timeout_s = rendezvous.world_size, rendezvous.timeout_s
    if rendezvous.nccl_unique_id is not None:
        return NcclCollective(rendezvous.nccl_unique_id, epoch, rank, world_size, device, timeout_s)
    group = GlooCollective(store, epoch, rank, world_size, own_host, timeout_s)
    return IpcCollective(group, rank, device) if rendezvous.transport == "ipc" else group


def _within(
    timeout_s: float,
    call: Callable[[], Collective],
    outcome: "Future[Collective]",
    discard: Callable[[Collective], None],
) -> Collective:
    """Call in a thread of its own what may block for ever in C. Raises TimeoutError; what comes later is discarded.

    So is what comes after somebody else has given `outcome` an exception, which is then raised at once.
    """

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # whatever it is belongs to the caller, in the other thread
            traceback.clear_frames(error.__traceback__)  # they would keep the sockets of the failed join open
            with contextlib.suppress(InvalidStateError):
                outcome.set_exception(error)
            return
        try:
            outcome.set_result(result)
        except InvalidStateError:
            discard(result)

    threading.Thread(target=run, name="join", daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except TimeoutError:
        if outcome.cancel():
            raise
        return outcome.result()
