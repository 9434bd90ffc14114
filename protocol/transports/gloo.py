"""Collective over TCP between the CPUs of the ranks.

It is for machines without GPUs, and for GPUs that nothing else connects.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from protocol.errors import PushError
from protocol.transports.collective import Collective, RankContext

NUM_THREADS = 4
"""Number of broadcasts in progress at a time. The connection stays busy while the ranks agree on the next
ones."""
ABORT_CHECK_INTERVAL = timedelta(seconds=0.2)
LEAVE_TIMEOUT_S = 1.0
NEVER_SENT = 1
"""Tag of the message that `abort` waits for and no rank sends."""


class GlooCollective(Collective):
    """Gloo process group, separate from the default group of the process.

    Raises:
        PushError: If the group cannot be formed.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        rank, world_size, timeout_s = context.rank, context.rendezvous.world_size, self._timeout_s
        self._peers = [peer for peer in range(world_size) if peer != rank]
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Without a named device, gloo listens on the address that the host name resolves to.
        options._devices = [ProcessGroupGloo.create_device(hostname=context.rendezvous_store.own_host)]
        options._threads = NUM_THREADS
        options._timeout = timedelta(seconds=timeout_s)
        self._group: ProcessGroupGloo | None = None
        self._under_way: dict[int, Any] = {}
        """Broadcasts in progress. Each keeps the sockets open, so nothing else may hold a reference. A
        traceback would hold it for as long as it lives."""
        self._numbers = itertools.count()
        self._is_aborted = False
        try:
            self._group = ProcessGroupGloo(context.store, rank, world_size, options)
        except (RuntimeError, PushError) as error:  # errors of gloo and of its store
            raise PushError(
                f"rank {rank} of {world_size} could not connect to the other ranks of session {self._session}: {error} "
                f"(deadline {timeout_s:g} s, learner.weight_sync.timeout_s)"
            ) from error

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start a broadcast, and return a function that waits until it is done.

        The function raises PushError if the broadcast fails. Until it returns, the tensor may not change.
        Every rank must start its broadcasts in the same order.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        number = next(self._numbers)
        try:
            self._under_way[number] = self._open_group().broadcast([tensor], options)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self.failure(f"broadcast of {tensor.nbytes} bytes in", error) from error

        def wait() -> None:
            try:
                was_aborted = False
                while not self._work(number).is_completed():
                    if was_aborted:
                        raise RuntimeError("it was aborted")
                    was_aborted = self._is_aborted  # gives gloo one more interval to fail with a reason
                    with contextlib.suppress(RuntimeError):
                        self._work(number).wait(ABORT_CHECK_INTERVAL)
                self._work(number).wait()
            except RuntimeError as error:
                raise self.failure(f"broadcast of {tensor.nbytes} bytes in", error) from error
            finally:
                self._under_way.pop(number, None)

        return wait

    def barrier(self) -> None:
        """Wait until every rank has reached the barrier. Raises PushError if that fails."""
        try:
            self._open_group().barrier().wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self.failure("waiting for the other ranks of", error) from error

    def abort(self) -> None:
        self._is_aborted = True
        # ProcessGroupGloo.abort() wakes no operation. But an operation that times out closes all connections
        # of its group, which fails every other operation at once, here and at the peers. The receive below
        # times out after a millisecond. It is tried with each peer, because it does not time out with a peer
        # that has left.
        for peer in self._peers:
            with contextlib.suppress(RuntimeError, PushError):
                nothing = [torch.empty(1, dtype=torch.uint8)]
                work = self._open_group().recv(nothing, peer, NEVER_SENT)  # type: ignore[attr-defined]
                work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self.abort()
        self._under_way.clear()
        only_reference, self._group = [self._group], None
        # The group's destructor frees the sockets and the threads. It waits for all sends. If a connection
        # breaks as a send starts, gloo loses that send, which then fails only at its deadline.
        leaving = threading.Thread(target=only_reference.clear, name="leave", daemon=True)
        leaving.start()
        leaving.join(LEAVE_TIMEOUT_S)

    def _work(self, number: int) -> Any:
        if number not in self._under_way:
            raise PushError(f"the collective of session {self._session} is closed")
        return self._under_way[number]

    def _open_group(self) -> ProcessGroupGloo:
        """Return the group, or raise PushError if it is closed.

        Callers do not keep it in a local: the traceback of a failure would keep the sockets open.
        """
        if self._group is None:
            raise PushError(f"the collective of session {self._session} is closed")
        return self._group
