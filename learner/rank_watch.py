"""Immediate detection of dead ranks, whatever this rank is waiting in.

    rank 0 ◀── a TCP connection ──▶ every other rank
                     │ ended without a farewell: the process has died
                     ▼
                    RankLoss ─▶ rank 0 notifies the others ─▶ all end

The kernel closes the connections of a dead process, which its forks do not share, and keepalive probes detect a
silent host, so no heartbeat is needed. A rank that hangs keeps its connections, and learner.collective_timeout_s
detects it.
Invariant: END_S after a rank has died, no rank is left. One line has named the dead rank: one per node if it
was rank 0.
"""

import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from protocol.errors import TRANSIENT_ERROR, RankFailed, SlipstreamError
from protocol.line_socket import keep_alive, send_line

log = logging.getLogger(__name__)

END_S = 20.0
"""Time for an orderly end after a rank has died: to close the records, and perhaps complete a checkpoint."""
MEET_S = 30.0
"""Time for the ranks to connect, which all do at the same moment."""
NEWS_S = 2.0
"""Maximum time from the effect of a death on a collective to the news of the death."""
COLLECTIVE_FAILED = re.compile(r"gloo/|NCCL|ProcessGroup")
"""Pattern of torch's RuntimeErrors for failed collectives."""
MAX_LINE_BYTES = 1024
NUM_TOKEN_BYTES = 16


class Greeting(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First line in each direction."""

    token: str
    """Secret that rank 0 shares by a collective; no other host on the network knows it."""
    rank: int
    process: str
    """Process and host, as in `process 4711 on node3`."""


class RankFarewell(msgspec.Struct, tag=True, frozen=True):
    """Last line of a rank that ends in order, or that reports its own error."""


class RankLoss(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Notice that a rank has ended without a farewell."""

    rank: int
    process: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of this learner ({self.process}) has died, so all its ranks stop. If it logged no "
            "error, it was killed, maybe because memory ran out (see dmesg on that node). Continue from the last "
            "checkpoint with --resume"
        )


Line = Greeting | RankFarewell | RankLoss


class RankWatch:
    """Watch of one rank's connections, from the meeting of all ranks until they part."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Connect the ranks; every rank must call this."""
        self._rank, self._num_ranks = accelerator.process_index, accelerator.num_processes
        self._lost: RankLoss | None = None
        self._has_news, self._is_over = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._sockets: WeakSet[socket.socket] = WeakSet()
        if self._num_ranks > 1:
            os.register_at_fork(after_in_child=self._close_in_fork)
            self._meet(accelerator)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error with which this rank ends.

        If another rank died, this is SystemExit, because `_report_loss` has reported the death. Its code is that of a
        crash: on a network that was interrupted, every rank counts the others as dead. If another rank hangs,
        this is RankFailed. Otherwise, it is `error` itself.
        """
        if self._num_ranks == 1 or not isinstance(error, Exception):
            return error
        may_be_effect = isinstance(error, RankFailed) or not isinstance(error, SlipstreamError)
        if may_be_effect and self._has_news.wait(NEWS_S):
            return SystemExit(TRANSIENT_ERROR)
        if not isinstance(error, SlipstreamError) and COLLECTIVE_FAILED.search(str(error)):
            reason = str(error).splitlines()[0]
            error = RankFailed(
                "another rank of this learner has stopped or hangs; see its log. If it was only slow, raise "
                f"learner.collective_timeout_s ({reason})"
            )
        if isinstance(error, SlipstreamError):
            self.part()
        return error

    def part(self) -> None:
        """Announce that this rank ends in order, or reports its own error.

        Without the farewell, the other ranks assume that it died.
        """
        self._is_over.set()
        with self._lock:
            for connection in self._connections:
                send_line(connection, RankFarewell())

    def close(self) -> None:
        """Stop watching; if another rank has died, this rank still ends by force."""
        self._is_over.set()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    def _close_in_fork(self) -> None:
        """Close the sockets in a fork of this rank, which would keep the connections of a dead rank open.

        `close` would leave a descriptor open as long as `_lines` has a file of its socket.
        """
        for one in self._sockets:
            with suppress(OSError):  # closed before
                os.close(one.detach())

    @property
    def _reports_loss(self) -> bool:
        """True if this rank reports the lost rank.

        Rank 0 reports it. If rank 0 is lost, the first remaining rank of each node does.
        """
        if self._lost is None or self._lost.rank != 0:
            return self._rank == 0
        return self._rank == 1 or os.environ.get("LOCAL_RANK") == "0"

    def _meet(self, accelerator: Accelerator) -> None:
        """Connect to rank 0 at the address where torch's ranks meet.

        A collective distributes its port and the token.
        """
        is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(self._num_ranks)
        host = "127.0.0.1" if is_one_node else os.environ.get("MASTER_ADDR", "127.0.0.1")
        listener = _listen(host if is_one_node else "") if self._rank == 0 else None
        invitation = [listener.getsockname()[1], *secrets.token_bytes(NUM_TOKEN_BYTES)] if listener else []
        invitation += [0] * (1 + NUM_TOKEN_BYTES - len(invitation))
        port, *token = broadcast(torch.tensor(invitation, device=accelerator.device)).tolist()
        greeting = Greeting(
            token=bytes(token).hex(), rank=self._rank, process=f"process {os.getpid()} on {socket.gethostname()}"
        )
        if listener is not None:
            self._sockets.add(listener)
            _start(self._welcome, listener, greeting)
            return
        try:
            connection = socket.create_connection((host, port), MEET_S)
        except OSError as error:
            log.warning(
                "rank %d cannot reach rank 0 at %s, port %d (%s): if one of the two dies, the other detects it only "
                "after learner.collective_timeout_s",
                self._rank, host, port, error,
            )  # fmt: skip
            return
        self._begin(connection, greeting)

    def _welcome(self, listener: socket.socket, greeting: Greeting) -> None:
        with listener:
            listener.settimeout(MEET_S)
            try:
                while len(self._connections) < self._num_ranks - 1:
                    connection, _ = listener.accept()
                    connection.settimeout(MEET_S)
                    self._begin(connection, greeting)
            except TimeoutError:
                log.debug("%d ranks have not connected to rank 0", self._num_ranks - 1 - len(self._connections))

    def _begin(self, connection: socket.socket, greeting: Greeting) -> None:
        keep_alive(connection)
        self._sockets.add(connection)
        if self._rank != 0:
            # Not sent by the thread, so that a rank that dies before the thread starts is known by name, and one that
            # parts before rank 0 has answered says so.
            send_line(connection, greeting)
            with self._lock:
                self._connections.append(connection)
        _start(self._listen_to, connection, greeting)

    def _listen_to(self, connection: socket.socket, greeting: Greeting) -> None:
        """Read the peer's lines until it ends, and record a lost rank."""
        lines = _lines(connection)
        other = next(lines, None)
        if not isinstance(other, Greeting) or not secrets.compare_digest(other.token.encode(), greeting.token.encode()):
            connection.close()  # not a rank of this learner
            return
        if self._rank == 0:
            with self._lock:
                if self._is_over.is_set():
                    connection.close()  # without a greeting, the other rank takes this end for no death
                    return
                send_line(connection, greeting)  # only now, because it has the token
                self._connections.append(connection)
        connection.settimeout(None)
        for line in lines:
            if isinstance(line, RankLoss):
                self._report_loss(line)
            return
        self._report_loss(RankLoss(rank=other.rank, process=other.process))

    def _report_loss(self, lost: RankLoss) -> None:
        """Report the first lost rank, and end this process after END_S.

        Rank 0 notifies the other ranks. The report is printed at once, because a launcher may end this rank
        too.
        """
        with self._lock:
            if self._lost is not None or self._is_over.is_set():
                return
            self._lost = lost
            if self._rank == 0:
                for connection in self._connections:
                    send_line(connection, lost)
        if self._reports_loss:
            print(f"error: {lost}", file=sys.stderr, flush=True)
        self._has_news.set()
        time.sleep(END_S)
        # End by force: a collective may never notice, and Python may wait for a thread at exit.
        os._exit(TRANSIENT_ERROR)


def _listen(host: str) -> socket.socket:
    """Listen on a free port; without a host, on all addresses."""
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server((host, 0))
    return socket.create_server((host, 0), family=socket.AF_INET6, dualstack_ipv6=True)


def _start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name="rank-watch", daemon=True).start()


def _lines(connection: socket.socket) -> Iterator[Line]:
    """Yield lines until the connection ends, a line is invalid, or a read times out."""
    with connection.makefile("rb") as file, suppress(OSError, msgspec.DecodeError):
        while line := file.readline(MAX_LINE_BYTES):
            yield msgspec.json.decode(line, type=Line)
