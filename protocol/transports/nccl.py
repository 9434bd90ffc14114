"""Collective over NCCL between GPUs, on one node or several, with cupy's bindings.

    start_broadcast: the caller's stream ─▶ (event) ─▶ side stream: broadcast, broadcast, … ─▶ (event) ─▶ wait

The unique id that admits a rank is the secret of the Rendezvous, which travels inside the control channel.
NCCL has no deadline: a dead peer leaves a kernel that spins forever. Every broadcast is therefore watched from
outside, and its communicator aborted.
"""

import contextlib
import importlib.metadata
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from protocol.endpoint import is_loopback
from protocol.errors import PushError, PushInterrupted
from protocol.installation import install_command
from protocol.transports.collective import Collective, RankContext
from protocol.transports.interface import interface_of
from protocol.transports.rendezvous import RendezvousStore

log = logging.getLogger(__name__)
POLL_S = 0.0005
MAX_QUEUED = 64
"""Maximum number of queued broadcasts. A CUDA stream takes about a thousand entries. Adding more blocks in C,
where nothing can interrupt it."""
INTERFACE, FAMILY = "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY"
CUDA_VERSIONS = (11, 12, 13)
"""CUDA versions that cupy has packages for."""
SHARED_GPU_SINCE = (2, 30, 3)
"""Version of NCCL that admits two ranks on one GPU."""
SHARED_GPU_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


def new_unique_id() -> bytes:
    """Return the 128 bytes by which the ranks of one session find each other.

    Raises:
        PushError: NCCL is not installed.
    """
    return _bindings().get_unique_id()


def why_not_installed() -> str | None:
    """Return why NCCL cannot be used here, with the remedy, or None if it can.

    cupy must find a libnccl that answers: finding cupy alone proves nothing. The driver must also support the
    CUDA version that cupy is built for.
    """
    try:
        _bindings().get_version()
    except PushError as error:
        return str(error)
    except (RuntimeError, AttributeError) as error:  # AttributeError: libnccl is older than cupy requires
        return f"cupy's libnccl does not work ({error}){_mismatch()}; run {install_command(extra_for_nccl())}"
    return _obstacle_of_driver()


def extra_for_nccl() -> str:
    """Return the extra whose cupy matches the CUDA version of torch."""
    return "nccl-cuda12" if _cuda_of_torch() == 12 else "nccl"


def _cuda_of_torch() -> int | None:
    return int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else None


def _mismatch() -> str:
    """Return a clause for an error if cupy and torch have different CUDA versions.

    That is the usual reason. The clause is empty otherwise.
    """
    installed = [cuda for cuda in CUDA_VERSIONS if _is_distribution(f"cupy-cuda{cuda}x")]
    ours = _cuda_of_torch()
    if ours is None or not installed or ours in installed:
        return ""
    return f", because cupy-cuda{installed[0]}x is built for CUDA {installed[0]}, but torch for CUDA {ours}"


def _is_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _obstacle_of_driver() -> str | None:
    """Return an error if cupy is newer than the driver, otherwise None.

    Such a cupy loads, and fails at its first call.
    """
    from cupy.cuda import runtime

    try:
        of_cupy, of_driver = runtime.runtimeGetVersion() // 1000, runtime.driverGetVersion() // 1000
    except RuntimeError as error:
        return f"cupy cannot use CUDA here ({error}){_mismatch()}; run {install_command(extra_for_nccl())}"
    if of_cupy <= of_driver:
        return None
    return (
        f"cupy is built for CUDA {of_cupy}, but the driver supports CUDA {of_driver} at most; run pip uninstall "
        f"cupy-cuda{of_cupy}x, then {install_command(f'nccl-cuda{of_driver}' if of_driver == 12 else 'nccl')}"
    )


def use_interface_of(host: str) -> None:
    """Make NCCL use the interface by which the ranks have met.

    An interface named in the environment takes precedence. NCCL reads the variable once per process, so call
    this before its first use. Within one host, NCCL needs no interface.
    """
    if INTERFACE in os.environ or is_loopback(host):
        return
    name = interface_of(host)
    if name is None:
        log.warning(
            "found no interface with address %s, so NCCL chooses one; set %s to choose another", host, INTERFACE
        )
        return
    os.environ[INTERFACE] = f"={name}"  # whole name: eth1 alone would match eth10 too
    os.environ.setdefault(FAMILY, "AF_INET6" if ":" in host else "AF_INET")
    log.info("NCCL uses interface %s with address %s (%s overrides it)", name, host, INTERFACE)


def ranks_may_share_a_gpu() -> bool:
    """Return whether NCCL admits two ranks on one GPU.

    This needs NCCL 2.30.3 or newer, and NCCL_MULTI_RANK_GPU_ENABLE=1 on both sides.
    """
    return os.environ.get(SHARED_GPU_SWITCH) == "1" and _version() >= SHARED_GPU_SINCE


def _version() -> tuple[int, int, int]:
    code = _bindings().get_version()
    return code // 10_000, code // 100 % 100, code % 100


def _bindings() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise PushError(
            f"transport nccl needs cupy ({error}){_mismatch()}; run {install_command(extra_for_nccl())} on both sides, "
            'or set learner.weight_sync.transport = "tcp"'
        ) from error
    if not nccl.available:
        raise PushError(
            f"cupy is installed but finds no libnccl{_mismatch()}; run {install_command(extra_for_nccl())}, or set "
            'learner.weight_sync.transport = "tcp"'
        )
    return nccl


class SideStream:
    """Stream of one GPU for broadcasts, concurrent with training or generation."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    @contextlib.contextmanager
    def selected(self) -> Iterator[int]:
        """Make the GPU current in this thread, for NCCL, and yield the stream's address."""
        with torch.cuda.device(self._device):
            yield self._stream.cuda_stream

    def follow(self, tensor: torch.Tensor) -> None:
        """Order this stream after the work queued by the calling thread's stream.

        The tensor's memory is kept until this stream is done.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """Return an event whose query() is true once everything so far is done."""
        return self._stream.record_event()


class NcclCollective(Collective):
    """NCCL communicator of one session. Its creation blocks until all ranks have it.

    Raises:
        PushError: It cannot be formed.
    """

    between_gpus = True
    secret_bytes = 128
    may_hang = True
    finding = "cupy finds a working libnccl"

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        use_interface_of(context.rendezvous_store.own_host)
        self._nccl = _bindings()
        self._stream = SideStream(self.device)
        rank, world_size = context.rank, context.rendezvous.world_size
        self._lock = threading.Lock()
        """Lock that keeps the communicator from being aborted during use, because aborting frees it."""
        self._communicator: Any = None
        self._queued: deque[Any] = deque()
        """End events of the last broadcasts, done or not."""
        try:
            with self._stream.selected():
                self._communicator = self._nccl.NcclCommunicator(world_size, context.rendezvous.secret, rank)
        except RuntimeError as error:
            raise PushError(
                f"rank {rank} of {world_size} on {self.device} could not form session {self._session} over nccl: "
                f"{error}"
            ) from error
        # The first broadcast connects the GPUs and blocks in C meanwhile. Later ones only queue a kernel.
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    @classmethod
    def needs(cls) -> str:
        return f"an NVIDIA GPU and cupy with libnccl on both sides ({install_command(extra_for_nccl())})"

    @classmethod
    def why_not_here(cls) -> str | None:
        return why_not_installed()

    @classmethod
    def version(cls) -> str:
        return ".".join(map(str, _version()))

    @classmethod
    def obstacle(cls, devices: Sequence[str], is_explicit: bool) -> str | None:
        gpus = {device.rpartition("/")[2] for device in devices}  # two containers on one GPU have two host names
        # Ranks that share a GPU spin on it in turns, so they share one only if nccl is set explicitly.
        if len(gpus) == len(devices) or (is_explicit and ranks_may_share_a_gpu()):
            return None
        return f"two ranks would share a GPU, which needs NCCL 2.30.3 or newer and {SHARED_GPU_SWITCH}=1 on both sides"

    @classmethod
    def new_secret(cls, store: RendezvousStore, world_size: int, timeout_s: float) -> bytes:
        use_interface_of(store.own_host)
        return new_unique_id()

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Queue a broadcast behind earlier ones. Its deadline starts with the wait for it."""
        what = f"broadcast of {tensor.nbytes} bytes over nccl in session {self._session}"
        with self._aborting_on_failure(what):
            while len(self._queued) >= MAX_QUEUED:
                self._wait(self._queued.popleft(), what)
            done = self._queue(tensor)
            self._queued.append(done)

        def wait() -> None:
            with self._aborting_on_failure(what):
                self._wait(done, what)

        return wait

    def abort(self) -> None:
        with self._lock:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                communicator.abort()

    def close(self) -> None:
        # Not `destroy`, which waits for the peers.
        self.abort()

    @contextlib.contextmanager
    def _aborting_on_failure(self, what: str) -> Iterator[None]:
        """Abort the communicator, with all that is queued on it, on any failure."""
        try:
            yield
        except RuntimeError as error:
            self.abort()
            raise PushInterrupted(f"{what} failed: {error}") from error
        except PushError:
            self.abort()
            raise

    def _queue(self, tensor: torch.Tensor) -> Any:
        with self._lock, self._stream.selected() as stream:
            self._stream.follow(tensor)
            address = tensor.data_ptr()
            communicator = self._open_communicator()
            communicator.broadcast(address, address, tensor.nbytes, self._nccl.NCCL_UINT8, 0, stream)
            return self._stream.mark()

    def _wait(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._is_done(done):
            if time.monotonic() > deadline:
                raise PushInterrupted(
                    f"{what} did not finish within {self._timeout_s:g} s (learner.weight_sync.timeout_s): a rank is "
                    "suspended, gone or on a slow network"
                )
            time.sleep(POLL_S)

    def _is_done(self, done: Any) -> bool:
        was_done: bool = done.query()
        with self._lock:  # an abort also cancels queued work
            self._open_communicator().check_async_error()
        return was_done

    def _open_communicator(self) -> Any:
        if self._communicator is None:
            raise PushInterrupted(f"the collective of session {self._session} was aborted or closed")
        return self._communicator
