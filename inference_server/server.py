"""The server's loop: one ROUTER socket in front of one engine, for one learner at a time.

    learner ── Hello, Generate, Ack, Cancel, Score, PushBegin, PushAbort, Farewell ──▶ receive ─▶ tasks
    doctor ── Probe, Trial ──▶ receive ─▶ probes.py, whichever run is served
    learner ◀── Welcome, Refused, Group, GroupFailed, Scores, PushReady, PushDone, PushFailed ── tasks
    learner ◀── Pulse every 0.4 s ── pulse: sends waiting groups, frees the server of an absent learner

The receive loop never waits for the engine, and each task waits with a deadline. When the engine dies, its
weights are lost: the server gets a new id and has no version until the next sync. Finished groups stay valid,
because each token has a version label. The learner requests running groups again.
Invariant: an unexpected exception affects only its own request, message or loop iteration (containment.py).
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from inference_server.config import ServerConfig
from inference_server.drain import REASON, Drain
from inference_server.engine.containment import log_unexpected, record_unexpected, run_contained
from inference_server.engine.interface import Engine, EngineDead
from inference_server.engine.supervisor import EngineSupervisor, StallDetector
from inference_server.probes import ProbeHandler
from inference_server.refusals import Refusals, why_mismatched
from inference_server.requests import Groups, drain_failure, no_scores, scores_of, why_invalid
from inference_server.tenancy import LeaseHolder, Tenancy
from inference_server.weight_update import WeightUpdates
from protocol.channel.sockets import SendResult, ServerChannel
from protocol.errors import ProtocolError
from protocol.messages import (
    Ack,
    Cancel,
    Farewell,
    Generate,
    GroupFailed,
    Hello,
    LearnerMessage,
    Message,
    ModelFingerprint,
    Probe,
    Pulse,
    PushAbort,
    PushBegin,
    Refused,
    Score,
    Trial,
    Welcome,
)

log = logging.getLogger(__name__)

PULSE_INTERVAL_S = 0.4
"""Interval between pulses and between connection checks, in seconds. A check closes a connection that was
silent for 2 s, and the next pulse detects the loss, within 3 s in total."""
RECEIVE_PAUSE_S = 0.1
MAX_RECEIVE_FAILURES = 100
"""Number of consecutive failures that mean a broken socket. Only a new process gets a new socket."""
MAX_IGNORED_PEERS = 1_000
"""Number of peers with malformed messages that the server remembers. A forgotten peer is notified again."""


class Server:
    """Server of one learner at a time."""

    def __init__(
        self,
        channel: ServerChannel,
        engine: Engine,
        model: ModelFingerprint,
        config: ServerConfig,
        model_digest: str = "",
    ) -> None:
        self._channel, self._engine, self._model, self._config = channel, engine, model, config
        self._model_digest, self._num_scores = model_digest, 0
        self._server_id = _new_id()
        self._started_at = time.monotonic()
        self._tenancy = Tenancy(config.orphan_timeout_s, time.monotonic())
        self._unsent: deque[Message] = deque()
        """Answers not yet sent on the learner's current connection."""
        self._ignored_peers: deque[bytes] = deque(maxlen=MAX_IGNORED_PEERS)
        self._refusals = Refusals()
        self._num_busy_answers = 0
        self._tasks = asyncio.TaskGroup()
        self._life = EngineSupervisor(
            engine, self._tasks, config.max_engine_restarts, self._check_progress, self._forget_engine
        )
        self._pushes = WeightUpdates(
            engine,
            self._deliver,
            self._notify,
            config.pause_timeout_s,
            overlap_weight_loading=config.overlap_weight_loading,
        )
        self._groups = Groups(engine, self._deliver, self._notify, self._life.spawn, self._pushes.generating_s)
        self._probes = ProbeHandler(channel, engine, model, self._life)
        self.drain = Drain(
            self._life, self._pushes, self._groups, config.drain_timeout_s,
            lambda: self._deliver(self._pulse_message()), lambda: self._tenancy.away_s(time.monotonic()),
        )  # fmt: skip
        self._stall = StallDetector(engine, self._pushes.generating_s, config.stall_timeout_s)

    async def serve(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run the engine and the loops until canceled.

        `on_ready` is called once, when the server answers learners and HTTP.

        Raises:
            EngineDead: The engine has died too often.
        """
        try:
            async with self._tasks:
                self._tasks.create_task(self._life.keep(), name="engine")
                await self._life.alive.wait()
                on_ready()
                self._tasks.create_task(self._receive(), name="receive")
                self._tasks.create_task(self._pulse(), name="pulse")
        except* EngineDead as dead:
            raise EngineDead(str(dead.exceptions[0])) from dead

    def status(self) -> dict[str, Any]:
        """Return the content of /status."""
        uptime_s = time.monotonic() - self._started_at
        return {
            "server_id": self._server_id,
            "run": self._served_run,
            "tenancy": self._tenancy.status(time.monotonic()),
            "architecture": self._model.architecture,
            "quantization": self._engine.limits.quantization or None,
            "policy_version": self._pushes.version,
            "weights_run": self._pushes.weights_run,
            "weights_checksum": self._pushes.checksum,
            "push_state": self._pushes.state,
            "pushes_done": self._pushes.num_done,
            "pushes_failed": self._pushes.num_failed,
            "push_stall_s": round(self._pushes.stall_s, 3),
            "groups_running": self._groups.num_running,
            "groups_unacked": self._groups.num_unacked,
            "requests_running": self.drain.num_requests(),
            "tokens_generated": self._groups.tokens_generated,
            "uptime_s": round(uptime_s, 3),
            "idle_frac": round(self._groups.idle_s / uptime_s, 4),
            "engine_restarts": self._life.num_restarts,
            "draining": self.drain.is_draining,
            "unavailable": self._why_unavailable(),
            "messages_refused": self._refusals.num_messages + self._channel.num_shut_out,
            "busy_answers": self._num_busy_answers,
            "handshakes_failed": self._refusals.num_handshakes,
        }

    @property
    def _served_run(self) -> str | None:
        return self._tenancy.holder.run if self._tenancy.holder else None

    def _why_unavailable(self) -> str | None:
        if self.drain.is_draining:
            return REASON
        if reason := self._life.why_not_alive:
            return reason
        if self._pushes.state == "torn":
            return (
                "a weight sync failed during loading, or the engine with the synced weights has died, so the server "
                "has neither old nor new weights; it generates again after the learner's next complete weight sync"
            )
        return None

    # --- loops -------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        num_failures = 0
        while True:
            try:
                peer, message = await self._channel.receive()
            except Exception as error:
                num_failures += 1
                if num_failures == MAX_RECEIVE_FAILURES:
                    raise
                record_unexpected(error, "receiving a message")
                await asyncio.sleep(RECEIVE_PAUSE_S)
                continue
            num_failures = 0
            doing = f"handling a message ({type(message).__name__})"
            await run_contained(self._handle(peer, message), doing, partial(self._fail, message))

    async def _handle(self, peer: bytes, message: LearnerMessage | ProtocolError) -> None:
        if peer in self._ignored_peers:
            self._refusals.message("from peers with earlier malformed messages")
            return
        match message:
            case ProtocolError():
                await self._ignore(peer, str(message))
            case Hello():
                await self._greet(peer, message)
            case Probe():
                await self._probes.answer(peer, message, self._served_run)
            case Trial():
                self._tasks.create_task(self._probes.try_transfer(peer, message))
            case _ if self._tenancy.holder is None or self._tenancy.holder.peer != peer:
                # This connection was lost and made again. Its peer receives no pulse and therefore sends
                # Hello. An answer would hide the loss.
                self._refusals.message(f"{type(message).__name__} on a connection without a Hello")
            case Ack(group_ids=group_ids):
                self._groups.acknowledge(group_ids)
                await self._groups.deliver_rest()
            case Cancel(group_ids=group_ids):
                self._groups.cancel(group_ids)
            case Farewell(is_over=True):
                log.info("run %s is over", self._served_run)
                self._free()
            case Farewell():
                self.drain.on_farewell()
            case PushBegin() if self.drain.is_draining:
                await self._notify(self.drain.refusal_of(message))
            case _ if not self._life.is_alive:
                log.info("ignored %s (the engine has died)", type(message).__name__)
            case Generate():
                await self._start_group(message)
            case Score():
                self._life.spawn(self._score(message), "a score", partial(self._fail, message))
            case PushBegin():
                self._life.spawn(self._pushes.push(message), "a weight sync", partial(self._fail, message))
            case PushAbort():
                self._life.spawn(self._pushes.abort(message), "leaving a session")

    async def _fail(self, message: LearnerMessage | ProtocolError, why: str) -> None:
        """Answer a message whose handler raised an exception.

        Only a failed Generate, Score or PushBegin is answered. The peer repeats any other message, or its
        loss does no harm.
        """
        match message:
            case Generate(group_id=group_id):
                await self._groups.fail(group_id, why)
            case Score(request_id=request_id):
                await self._notify(no_scores(request_id, why))
            case PushBegin():
                await self._notify(self._pushes.failed(message, why, weights_intact=self._pushes.state != "torn"))

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_INTERVAL_S)
            with log_unexpected("checking the connections"):
                self._refusals.handshakes(self._channel.pop_failed_handshakes())
                self._refusals.log_counts()
                self._channel.poll_connections()
            with log_unexpected("sending a pulse"):
                await self._pulse_once()

    async def _pulse_once(self) -> None:
        if await self._deliver(self._pulse_message()):  # A failed send reveals a lost connection.
            await self._send_rest()
            await self._groups.deliver_rest()
        elif self._tenancy.is_due(time.monotonic()):
            log.warning(
                "released the server from run %s, unreachable for %g s (server.orphan_timeout_s): "
                "dropped %d running and %d finished groups",
                self._served_run, self._config.orphan_timeout_s, self._groups.num_running, self._groups.num_unacked,
            )  # fmt: skip
            self._free()

    # --- learner -----------------------------------------------------------------------------------------

    async def _greet(self, peer: bytes, hello: Hello) -> None:
        if (refused := self._why_refused(hello)) is not None:
            if refused.is_busy:
                self._num_busy_answers += 1
            else:
                self._refusals.message("Hello", f"run {hello.run}: {refused.reason}")
            await self._channel.send(peer, refused)
            return
        if not self._life.is_alive or self._pushes.is_ending or self.drain.is_draining:
            self._tenancy.extend(hello.run, time.monotonic())
            return  # The learner repeats its Hello until this server or its successor answers.
        before = self._tenancy.holder
        if self._tenancy.hold(LeaseHolder(run=hello.run, learner=hello.learner, peer=peer), time.monotonic()):
            self._groups.forget_all()
            self._pushes.begin_run(hello.run)
            # The id stands for the weights of a run, and this run has none here yet.
            self._server_id = _new_id()
            log.info("serving run %s, learner %s", hello.run, hello.learner)
        if before is None or before.peer != peer:
            self._unsent.clear()  # The learner repeats the requests of these answers.
            self._groups.on_new_connection()
        self._channel.admit(peer)
        limits = self._engine.limits
        await self._deliver(
            Welcome(
                server_id=self._server_id, policy_version=self._pushes.version_of_run, num_workers=limits.num_workers,
                dtype=limits.dtype, transports=self._life.transports,
                devices=[worker.device for worker in self._life.workers],
                max_model_len=limits.max_model_len,
                max_concurrent_sequences=limits.max_concurrent_sequences, is_untouched=self._pushes.engine_is_untouched,
                num_replicas=limits.num_replicas, max_lora_rank=limits.max_lora_rank,
                quantization=limits.quantization,
                model_digest=self._model_digest,
                experts=limits.experts,
            )
        )  # fmt: skip
        await self._groups.deliver_rest()

    def _why_refused(self, hello: Hello) -> Refused | None:
        """Return why this learner cannot be served, or None.

        Sends nothing, so the Hellos of other learners cost the served learner nothing.
        """
        if (mismatch := why_mismatched(hello, self._model)) is not None:
            return Refused(reason=mismatch)
        busy = self._tenancy.why_busy(hello.run, hello.learner, time.monotonic())
        return None if busy is None else Refused(reason=busy.reason, is_busy=True, free_in_s=busy.free_in_s)

    def _free(self) -> None:
        """Release the server from its learner. The current weights keep answering /v1."""
        self._groups.forget_all()
        self._unsent.clear()
        self._tenancy.free(time.monotonic())
        self._channel.admit(None)

    async def _ignore(self, peer: bytes, reason: str) -> None:
        """Report a malformed message to its peer once, and ignore the peer from then on."""
        self._refusals.message("malformed", reason)
        self._ignored_peers.append(peer)
        await self._channel.send(peer, Refused(reason=f"malformed message: {reason}"))

    async def _deliver(self, message: Message) -> bool:
        """Send to the learner. Return False if there is none or it is unreachable now."""
        holder = self._tenancy.holder
        if holder is None:
            return False
        is_ignored = holder.peer in self._ignored_peers
        sent = SendResult.PEER_GONE if is_ignored else await self._channel.send(holder.peer, message)
        if sent is SendResult.PEER_GONE:
            self._tenancy.lose(time.monotonic())
        return bool(sent)

    async def _notify(self, message: Message) -> None:
        """Send to the learner now, or after the next successful pulse."""
        is_sent = False
        with log_unexpected(f"sending {type(message).__name__}"):
            is_sent = await self._deliver(message)
        if not is_sent:
            self._unsent.append(message)

    async def _send_rest(self) -> None:
        while self._unsent:
            # Removed before the send, so that a message whose send raises again is dropped.
            message = self._unsent.popleft()
            if not await self._deliver(message):
                self._unsent.appendleft(message)
                return

    def _check_progress(self) -> None:
        self._groups.time_out_stalled()
        self._stall.check(self._groups.num_running + self._num_scores)

    async def _forget_engine(self) -> None:
        self._server_id = _new_id()
        self._pushes.forget_engine()
        await self._deliver(self._pulse_message())  # The new id notifies the learner at once.

    def _pulse_message(self) -> Pulse:
        return Pulse(
            server_id=self._server_id,
            policy_version=self._pushes.version_of_run,
            groups_running=self._groups.num_running,
            groups_unacked=self._groups.num_unacked,
            tokens_generated=self._groups.tokens_generated,
            idle_s=self._groups.idle_s,
            is_draining=self.drain.is_draining,
        )

    # --- requests ----------------------------------------------------------------------------------------

    async def _start_group(self, request: Generate) -> None:
        if problem := why_invalid(request, self._engine.limits):
            failed = GroupFailed(group_id=request.group_id, code="invalid_prompt", message=problem, retryable=False)
            await self._notify(failed)
        elif self.drain.is_draining and not self._groups.knows(request.group_id):
            await self._notify(drain_failure(request.group_id))
        elif self._pushes.version_of_run is None:
            reason = "the server has no weights of this run yet; sync weights before requesting groups"
            failed = GroupFailed(group_id=request.group_id, code="not_ready", message=reason, retryable=True)
            await self._notify(failed)
        else:
            self._groups.start(request)

    async def _score(self, request: Score) -> None:
        has_weights = self._pushes.version_of_run is not None or self._pushes.engine_is_untouched
        self._num_scores += 1
        try:
            scores = await scores_of(request, self._engine, has_weights=has_weights)
        finally:
            self._num_scores -= 1
        await self._notify(scores)


def _new_id() -> str:
    return uuid.uuid4().hex[:12]
