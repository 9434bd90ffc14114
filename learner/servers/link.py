"""The learner's link to one inference server: handshake, heartbeat, requests and replies.

    consumes: ServerMessage from the channel              produces: groups, replies to push and score
    waits for: Welcome after Hello, a Pulse every 0.4 s   unblocked by: any server at the endpoint

The server may die and return at any moment. The link notices within 3 s: at once if the connection breaks,
otherwise by missing heartbeats. It then repeats Hello until it is welcomed again. The `server_id` shows
whether the server still has the synced weights. The link runs in one event loop and never blocks.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from protocol.channel.keys import LearnerKeys
from protocol.channel.sockets import LearnerChannel
from protocol.errors import (
    DeadlineExceeded,
    HandshakeRefused,
    ProtocolError,
    PushError,
    PushIncomplete,
    PushInterrupted,
    ScoringFailed,
    ServerLost,
)
from protocol.messages import (
    Ack,
    Cancel,
    Farewell,
    Generate,
    Group,
    GroupFailed,
    Hello,
    Message,
    Pulse,
    PushAbort,
    PushBegin,
    PushDone,
    PushFailed,
    PushReady,
    Refused,
    Score,
    Scores,
    ServerMessage,
    Welcome,
)

log = logging.getLogger(__name__)

HELLO_INTERVAL_S = 0.25
BUSY_INTERVAL_S = 1.0
"""Interval between Hellos to a busy server in seconds, unless the server will be free sooner."""
BUSY_FOR_S = 5.0
"""Lifetime of a busy answer in seconds. A busy server repeats it at each Hello."""
HEAD_START_S = 3.0
"""Delay before a waiting run sends Hello to a restarted server, in seconds.

The run that had the server reconnects within 1.3 s and therefore goes first.
"""
DEAD_AFTER_S = 2.25
"""Silence after which a server counts as dead: five heartbeats, noticed within 3 s."""
SEND_TIMEOUT_S = 3.0
LIVENESS_CHECK_S = 0.25
REFUSED_NOTE_S = 60.0
PushReply = PushReady | PushDone | PushFailed
OnGroup = Callable[[Group | GroupFailed], None]
OnWelcome = Callable[[Welcome], None]
R = TypeVar("R", PushReady, PushDone)


def _ignore(*message: object) -> None:
    """Ignore a message: the default callback."""


class ServerLink:
    """Link to one server, used in one event loop."""

    def __init__(self, endpoint: str, hello: Hello, *, keys: LearnerKeys | None = None, insecure: bool = False) -> None:
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self.idle_time = (0.0, 0.0)
        """Seconds in which the servers here had no group, and seconds that their heartbeats cover, so far."""
        self._hello = hello
        self._channel = LearnerChannel(endpoint, keys, insecure=insecure)
        self.handshakes_fail = False
        """Whether the peer at the endpoint ended a handshake while this run is not connected."""
        self._num_broken = 0
        """Number of broken connections. When it grows, the server must welcome this run again."""
        self.num_refused = 0
        """Number of malformed or unexpected messages. They are no sign of life."""
        self._refused_noted_at = -REFUSED_NOTE_S
        self._last_message_s = time.monotonic()
        self._last_pulse: tuple[Pulse, float] | None = None
        self._connected = False
        self.on_lost: Callable[[], None] = _ignore
        """Called whenever the server is no longer connected."""
        self.is_draining = False
        """True once the server announces that it shuts down after the groups it has started.

        A later server at this endpoint needs another link.
        """
        self._has_greeted = self._has_sent_farewell = self._has_left = False
        self.on_draining: Callable[[], None] = _ignore
        """Called when the server announces its shutdown."""
        self._busy: tuple[Refused, float] | None = None
        """Newest busy answer since the last Welcome, and its arrival time."""
        self._hello_at = 0.0
        """Earliest time of the next Hello."""
        self.on_busy: Callable[[Refused], None] = _ignore
        """Called at the first busy answer of a server that another learner has."""
        self._connection = 0
        """Number of Welcomes after a silence or from another server."""
        self._push: tuple[str, int] | None = None
        """Session and version of the newest weight sync. Replies to any other are late or replayed."""
        self._push_replies: asyncio.Queue[PushReply] = asyncio.Queue()
        self._scores: dict[str, asyncio.Future[Scores]] = {}
        self._unsent_acks: list[str] = []

    @property
    def connected(self) -> bool:
        """True while the server that welcomed this run sends heartbeats."""
        return self._connected

    @property
    def busy(self) -> Refused | None:
        """Answer of a server that another learner has.

        None if the server has welcomed this run or is silent.
        """
        if self._connected or self._busy is None or time.monotonic() - self._busy[1] > BUSY_FOR_S:
            return None
        return self._busy[0]

    @property
    def last_count(self) -> tuple[int, float]:
        """Number of groups on the server at its last heartbeat, and when that arrived.

        The groups are running or not acknowledged.
        """
        if self._last_pulse is None:
            return 0, 0.0
        pulse, arrived_at = self._last_pulse
        return pulse.groups_running + pulse.groups_unacked - len(self._unsent_acks), arrived_at

    async def run(self, on_group: OnGroup = _ignore, on_welcome: OnWelcome = _ignore) -> None:
        """Keep the link up until canceled, and pass on every group and Welcome.

        Raises:
            ExceptionGroup: Contains HandshakeRefused, if the server refused this run.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(on_group, on_welcome))
            tasks.create_task(self._stay_connected())

    def close(self) -> None:
        self._channel.close()

    async def _stay_connected(self) -> None:
        while True:
            self._note_failed_handshakes()
            if self._channel.poll_connection():
                self._last_message_s = time.monotonic()  # heartbeats queue behind a long message on a slow link
            silent_s = time.monotonic() - self._last_message_s
            if self._connected and (silent_s > DEAD_AFTER_S or self._channel.num_broken > self._num_broken):
                why = f"no message for {silent_s:.1f} s" if silent_s > DEAD_AFTER_S else "the connection broke"
                if not self.is_draining:
                    log.warning("lost the server at %s (%s); waiting for it to return", self.endpoint, why)
                self._mark_lost()
            if self._busy is not None and (not self._channel.is_up or self._channel.num_broken > self._num_broken):
                self._hello_at = time.monotonic() + HEAD_START_S
            self._num_broken = self._channel.num_broken
            if self._connected and self.is_draining and not self._has_sent_farewell:
                self._has_sent_farewell = await self._try_send(Farewell(), HELLO_INTERVAL_S)
            elif self._wants_welcome and time.monotonic() >= self._hello_at:
                self._has_greeted = True
                await self._try_send(self._hello, HELLO_INTERVAL_S)
            await asyncio.sleep(HELLO_INTERVAL_S)

    @property
    def _wants_welcome(self) -> bool:
        """True if Hello must be sent. A draining server's successor gets another link."""
        return not (self._connected or self.is_draining or self._has_left)

    def _note_failed_handshakes(self) -> None:
        failed = self._channel.check_handshake() and not self._connected
        if failed and not self.handshakes_fail:
            log.warning(
                "the peer at %s rejected the handshake; if this repeats, replace `server.pub` in `keys` with the key "
                "of this server",
                self.endpoint,
            )
        self.handshakes_fail = failed or (self.handshakes_fail and not self._connected)

    async def _receive(self, on_group: OnGroup, on_welcome: OnWelcome) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except ProtocolError as error:
                self.refuse(str(error))
                continue
            self._last_message_s = time.monotonic()
            match message:
                case Welcome():
                    self._welcomed(message)
                    on_welcome(message)
                case Group() | GroupFailed():
                    if isinstance(message, GroupFailed) and message.code == "draining":
                        self._note_draining()  # the heartbeat that reports this may arrive later
                    on_group(message)
                case _:
                    self._dispatch(message)

    def refuse(self, reason: str) -> None:
        """Count an unusable message, and log it at most once a minute."""
        self.num_refused += 1
        if time.monotonic() - self._refused_noted_at > REFUSED_NOTE_S:
            self._refused_noted_at = time.monotonic()
            log.warning(
                "ignored an unusable message of the server at %s (%d messages so far): %s",
                self.endpoint, self.num_refused, reason,
            )  # fmt: skip

    def _dispatch(self, message: ServerMessage) -> None:
        match message:
            case Refused(is_busy=True):
                self._wait_for_turn(message)
            case Refused(reason=reason):
                raise HandshakeRefused(f"the server at {self.endpoint} refused this run: {reason}")
            case Pulse():
                self._pulsed(message)
            case Scores(request_id=request_id):
                waiting = self._scores.pop(request_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case PushReady() | PushDone() | PushFailed() if (message.session, message.version) == self._push:
                self._push_replies.put_nowait(message)

    def _welcomed(self, welcome: Welcome) -> None:
        self._note_failed_handshakes()
        # The Welcome arrived over a newer connection than the broken ones.
        self._num_broken = self._channel.num_broken
        is_new = self.welcome is None or welcome.server_id != self.welcome.server_id
        if is_new or not self._connected:
            self._connection += 1
            log.info(
                "connected to %s server %s at %s", "the" if is_new else "the same", welcome.server_id, self.endpoint
            )
        self.welcome, self._connected, self._busy = welcome, True, None

    def _wait_for_turn(self, refused: Refused) -> None:
        if not self._wants_welcome:
            return  # this answers a Hello from before the Welcome
        was_busy, now = self.busy is not None, time.monotonic()
        self._busy = (refused, now)
        self._hello_at = now + min(BUSY_INTERVAL_S, BUSY_INTERVAL_S if refused.free_in_s is None else refused.free_in_s)
        if not was_busy:
            self.on_busy(refused)

    def _pulsed(self, pulse: Pulse) -> None:
        if self._connected and self.welcome is not None and pulse.server_id != self.welcome.server_id:
            log.warning("the server at %s lost its engine and its weights; waiting for the next engine", self.endpoint)
            self._mark_lost()
        now, before = time.monotonic(), self._last_pulse
        if before is not None and before[0].server_id == pulse.server_id:
            idle_s, observed_s = self.idle_time
            self.idle_time = (idle_s + pulse.idle_s - before[0].idle_s, observed_s + now - before[1])
        self._last_pulse = (pulse, now)
        if pulse.is_draining:
            self._note_draining()

    def _note_draining(self) -> None:
        if not self.is_draining:
            self.is_draining = True
            self.on_draining()

    def _mark_lost(self) -> None:
        self._connected = False
        self.on_lost()

    async def _try_send(self, message: Message, timeout_s: float) -> bool:
        try:
            await self._channel.send(message, timeout_s)
        except DeadlineExceeded:
            return False
        return True

    async def generate(self, request: Generate) -> bool:
        """Request a group; False if the server cannot be reached now."""
        return await self._try_send(request, SEND_TIMEOUT_S)

    async def acknowledge(self, group_ids: list[str]) -> None:
        """Let the server forget groups.

        Acks that cannot be sent now go out with the next ones. An Ack that is lost with its connection costs
        only a duplicate, which the ledger recognizes.
        """
        acks, self._unsent_acks = self._unsent_acks + group_ids, []
        if not await self._try_send(Ack(group_ids=acks), SEND_TIMEOUT_S):
            self._unsent_acks += acks

    async def cancel(self, group_ids: list[str]) -> None:
        """Cancel groups at the server."""
        await self._try_send(Cancel(group_ids=group_ids), SEND_TIMEOUT_S)

    async def score(self, token_ids: Sequence[int] | np.ndarray, timeout_s: float, replica: int = 0) -> Scores:
        """Return the logprobs that one of the server's replicas gives to a sequence.

        Raises:
            ServerLost: The server went away before it scored.
            DeadlineExceeded: The server did not score within `timeout_s`.
            ScoringFailed: The server cannot score the sequence.
        """
        connection = self._connection
        request = Score(
            request_id=uuid.uuid4().hex, token_ids=np.asarray(token_ids, np.int32),
            deadline_s=timeout_s + SEND_TIMEOUT_S, replica=replica,
        )  # fmt: skip
        waiting: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._scores[request.request_id] = waiting
        deadline = time.monotonic() + timeout_s
        try:
            sent = await self._try_send(request, SEND_TIMEOUT_S)
            while not waiting.done():
                await asyncio.wait([waiting], timeout=min(LIVENESS_CHECK_S, max(0.0, deadline - time.monotonic())))
                if not sent or self._is_gone(connection):
                    raise ServerLost(f"the server at {self.endpoint} went away before it scored")
                if not waiting.done() and time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the server at {self.endpoint} did not score {len(token_ids)} tokens within {timeout_s:g} s"
                    )
        finally:
            self._scores.pop(request.request_id, None)
        scores = waiting.result()
        if scores.error is not None:
            kind = ServerLost if self._is_gone(connection) else ScoringFailed
            raise kind(f"the server at {self.endpoint} cannot score {len(token_ids)} tokens: {scores.error}")
        return scores

    def _is_gone(self, connection: int) -> bool:
        """Return whether the connection has ended; its requests may get no answer."""
        return not self._connected or self._connection != connection

    async def begin_push(self, begin: PushBegin, timeout_s: float) -> None:
        """Send PushBegin and wait for PushReady. Raises PushError or DeadlineExceeded."""
        self._push, self._push_replies = (begin.session, begin.version), asyncio.Queue()
        await self._channel.send(begin, SEND_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s):
                await self._push_reply(PushReady, begin.session)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no PushReady for version {begin.version} in session {begin.session} from {self.endpoint} within "
                f"{timeout_s:g} s (learner.weight_sync.timeout_s)"
            ) from error

    async def finish_push(self, session: str) -> PushDone:
        """Wait for PushDone while the server sends heartbeats. Raises PushError."""
        return await self._push_reply(PushDone, session)

    async def abort_push(self, session: str) -> None:
        """Notify the server that a session is aborted, if it can be reached.

        The server would also find out without this message.
        """
        await self._try_send(PushAbort(session=session), HELLO_INTERVAL_S)

    async def greet_again(self) -> None:
        """Treat the server as lost until it has welcomed this run again.

        A new handshake shows earlier than a timeout whether the server is alive.
        """
        if self._connected:
            self._mark_lost()

    async def leave(self) -> None:
        """Notify the server, if possible, that the run is over, and send no more Hellos."""
        self._has_left = True
        if self._has_greeted and self.busy is None:  # the server may have accepted a Hello whose Welcome is on its way
            await self._try_send(Farewell(is_over=True), HELLO_INTERVAL_S)

    async def _push_reply(self, wanted: type[R], session: str) -> R:
        connection = self._connection
        while True:
            try:
                async with asyncio.timeout(LIVENESS_CHECK_S):
                    reply = await self._push_replies.get()
            except TimeoutError as error:
                if self._is_gone(connection):
                    raise PushError(
                        f"the server at {self.endpoint} went away before {wanted.__name__} in session {session}"
                    ) from error
                continue
            if isinstance(reply, PushFailed):
                kind = PushInterrupted if reply.interrupted else PushError if reply.retryable else PushIncomplete
                raise kind(f"the server failed in state {reply.state}: {reply.message}")
            if isinstance(reply, wanted):
                return reply
