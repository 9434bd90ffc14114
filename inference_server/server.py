"""The server's loop: one ROUTER socket in front of one engine, for one learner at a time.

learner ── Hello, Generate, Ack, Cancel, Score, PushBegin, PushAbort ──▶ receive ▸ match ▸ task per group, score, push
learner ◀── Welcome, Refused, Group, GroupFailed, Scores, PushReady, PushDone, PushFailed ── the tasks
learner ◀── Pulse ── pulse, once a second

receive   consumes messages; starts tasks and never waits for the engine; ends with the server
pulse     consumes nothing; says that the server is alive, sends unacknowledged groups again, drops the groups of a
          learner that cannot be reached, ends the server when the engine has died
tasks     wait for the engine, each with a deadline; unblocked by its answer, a Cancel or the deadline
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from inference_server.config import ServerConfig
from inference_server.engine import Engine, EngineDead, EngineFailed, WorkerPlace
from inference_server.groups import Groups, why_invalid, why_not_tokens
from inference_server.push import Pushes
from inference_server.refusals import Refusals
from protocol.channel import ServerChannel
from protocol.errors import ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Generate,
    GroupFailed,
    Hello,
    Message,
    ModelFingerprint,
    Pulse,
    PushAbort,
    PushBegin,
    Refused,
    Score,
    Scores,
    Welcome,
)

log = logging.getLogger(__name__)

PULSE_INTERVAL_S = 1.0
MAX_IGNORED_PEERS = 1_000
"""So many peers that sent rubbish are remembered; one that is forgotten is told once more."""


class Learner(msgspec.Struct):
    """The one learner that is served."""

    run: str
    peer: bytes
    reached_at: float
    """When a message could last be handed to its connection."""


class Server:
    """Serves one learner at a time; `serve` runs until it is cancelled or the engine dies (EngineDead)."""

    def __init__(self, channel: ServerChannel, engine: Engine, model: ModelFingerprint, config: ServerConfig) -> None:
        self._channel, self._engine, self._model, self._config = channel, engine, model, config
        self._server_id = uuid.uuid4().hex[:12]
        self._started_at = time.monotonic()
        self._learner: Learner | None = None
        self._ignored_peers: deque[bytes] = deque(maxlen=MAX_IGNORED_PEERS)
        self._refusals = Refusals()
        self._places: Sequence[WorkerPlace] = ()
        self._tasks = asyncio.TaskGroup()
        self._groups = Groups(engine, self._deliver, self._tasks)
        self._pushes = Pushes(engine, self._deliver, config.pause_timeout_s, receive_overlap=config.receive_overlap)

    async def serve(self) -> None:
        self._places = await self._engine.places()
        try:
            async with self._tasks:
                self._tasks.create_task(self._receive(), name="receive")
                self._tasks.create_task(self._pulse(), name="pulse")
        except* EngineDead as dead:
            raise EngineDead(str(dead.exceptions[0])) from dead

    def status(self) -> dict[str, Any]:
        """What /status shows."""
        uptime_s = time.monotonic() - self._started_at
        return {
            "server_id": self._server_id,
            "run": self._learner.run if self._learner else None,
            "architecture": self._model.architecture,
            "policy_version": self._pushes.version,
            "weights_fingerprint": self._pushes.fingerprint,
            "push_state": self._pushes.state,
            "pushes_done": self._pushes.num_done,
            "pushes_failed": self._pushes.num_failed,
            "push_stall_s": round(self._pushes.stall_s, 3),
            "groups_running": self._groups.num_running,
            "groups_unacked": self._groups.num_unacked,
            "tokens_generated": self._groups.tokens_generated,
            "uptime_s": round(uptime_s, 3),
            "idle_frac": round(self._groups.idle_s / uptime_s, 4),
            "messages_refused": self._refusals.num_messages + self._channel.num_shut_out,
            "handshakes_failed": self._refusals.num_handshakes,
        }

    # --- loops -------------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            peer, message = await self._channel.receive()
            if peer in self._ignored_peers:
                self._refusals.message("of peers that sent rubbish before")
                continue
            match message:
                case ProtocolError():
                    await self._ignore(peer, str(message))
                case Hello():
                    await self._greet(peer, message)
                case _ if self._learner is None or self._learner.peer != peer:
                    # A connection that was lost and made again. It hears no pulse and so will say Hello: an answer here
                    # would only keep it from noticing.
                    self._refusals.message(f"{type(message).__name__} on a connection that has not said Hello")
                case Generate():
                    await self._ask(message)
                case Ack(group_ids=group_ids):
                    self._groups.acknowledge(group_ids)
                case Cancel(group_ids=group_ids):
                    self._groups.cancel(group_ids)
                case Score():
                    self._tasks.create_task(self._score(message))
                case PushBegin():
                    self._tasks.create_task(self._pushes.push(message))
                case PushAbort():
                    self._tasks.create_task(self._pushes.abort(message))

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_INTERVAL_S)
            self._engine.check_alive()
            self._refusals.handshakes(self._channel.take_failed_handshakes())
            self._refusals.note()
            if self._learner is None:
                continue
            if await self._deliver(self._pulse_message()):
                await self._groups.resend()
            elif time.monotonic() - self._learner.reached_at > self._config.orphan_timeout_s:
                log.warning(
                    "run %s has not been reached for %g s (server.orphan_timeout_s): %d running and %d finished groups dropped",
                    self._learner.run, self._config.orphan_timeout_s, self._groups.num_running, self._groups.num_unacked,
                )  # fmt: skip
                self._groups.forget_all()
                self._learner = None

    # --- learner -----------------------------------------------------------------------------------------------------

    async def _greet(self, peer: bytes, hello: Hello) -> None:
        if reason := await self._why_refused(hello):
            self._refusals.message("Hello", f"run {hello.run}: {reason}")
            await self._channel.send(peer, Refused(reason=reason))
            return
        if self._learner is None or self._learner.run != hello.run:
            self._groups.forget_all()
            self._pushes.forget_version()
            self._server_id = uuid.uuid4().hex[:12]  # what the id stands for, the weights and the groups, is gone
            log.info("serving run %s", hello.run)
        self._learner = Learner(run=hello.run, peer=peer, reached_at=time.monotonic())
        self._channel.admit(peer)
        limits = self._engine.limits
        await self._deliver(
            Welcome(
                server_id=self._server_id, policy_version=self._pushes.version, num_workers=limits.num_workers,
                dtype=limits.dtype, transports=self._common_transports(), devices=[place.device for place in self._places],
                max_model_len=limits.max_model_len,
                max_concurrent_sequences=limits.max_concurrent_sequences,
            )
        )  # fmt: skip
        await self._groups.resend(after_s=0)

    def _common_transports(self) -> list[str]:
        first, *others = [place.transports for place in self._places]
        return [transport for transport in first if all(transport in other for other in others)]

    async def _why_refused(self, hello: Hello) -> str | None:
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"the learner speaks protocol version {hello.protocol_version}, the server {PROTOCOL_VERSION}; "
                "install the same slipstream-rl on both sides"
            )
        if hello.model != self._model:
            return (
                f"the learner's model is {_in_words(hello.model)}, the server's {_in_words(self._model)}; "
                "start both with the same `model` in the config"
            )
        # Asking the socket is the test: a connection that is gone is unknown to it.
        busy = (
            self._learner is not None and self._learner.run != hello.run and await self._deliver(self._pulse_message())
        )
        if busy and self._learner is not None:
            return (
                f"the server is busy with run {self._learner.run}; wait for its end, stop it, or start another server"
            )
        return None

    async def _ignore(self, peer: bytes, reason: str) -> None:
        """A peer that sends rubbish is told so once; from then on nothing it sends is looked at."""
        self._refusals.message("malformed", reason)
        self._ignored_peers.append(peer)
        await self._channel.send(peer, Refused(reason=f"malformed message: {reason}"))

    async def _deliver(self, message: Message) -> bool:
        """Send to the learner; False if there is none or it cannot be reached now."""
        learner = self._learner
        if (
            learner is None
            or learner.peer in self._ignored_peers
            or not await self._channel.send(learner.peer, message)
        ):
            return False
        learner.reached_at = time.monotonic()
        return True

    def _pulse_message(self) -> Pulse:
        return Pulse(
            server_id=self._server_id,
            policy_version=self._pushes.version,
            groups_running=self._groups.num_running,
            groups_unacked=self._groups.num_unacked,
            tokens_generated=self._groups.tokens_generated,
            idle_s=self._groups.idle_s,
        )

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _ask(self, request: Generate) -> None:
        if problem := why_invalid(request.prompt_token_ids, request.sampling, self._engine.limits):
            failed = GroupFailed(group_id=request.group_id, code="invalid_prompt", message=problem, retryable=False)
            await self._deliver(failed)
        elif self._pushes.version is None:
            reason = "the server has no weights of this run yet; push before asking for groups"
            failed = GroupFailed(group_id=request.group_id, code="not_ready", message=reason, retryable=True)
            await self._deliver(failed)
        else:
            await self._groups.ask(request)

    async def _score(self, request: Score) -> None:
        await self._deliver(await self._scores(request))

    async def _scores(self, request: Score) -> Scores:
        limits = self._engine.limits
        if self._pushes.version is None:
            return _no_scores(request.request_id, "the server has no weights of this run yet; push before scoring")
        if problem := why_not_tokens(request.token_ids, limits):
            return _no_scores(request.request_id, problem)
        # vLLM scores a prompt on the way to a first token, which needs a place of its own.
        if not 2 <= len(request.token_ids) < limits.max_model_len:
            expected = f"2 to {limits.max_model_len - 1} (server.max_model_len - 1)"
            return _no_scores(request.request_id, f"{len(request.token_ids)} tokens came to score; expected {expected}")
        try:
            async with asyncio.timeout(request.deadline_s):
                logprobs, version = await self._engine.score(request.token_ids)
        except TimeoutError:
            return _no_scores(
                request.request_id, f"not scored within the request's deadline of {request.deadline_s:g} s"
            )
        except EngineFailed as error:
            return _no_scores(request.request_id, str(error))
        return Scores(request_id=request.request_id, logprobs=logprobs, policy_version=version)


def _no_scores(request_id: str, error: str) -> Scores:
    return Scores(request_id=request_id, logprobs=np.zeros(0, dtype=np.float32), policy_version=None, error=error)


def _in_words(model: ModelFingerprint) -> str:
    return f"{model.architecture} of {model.size} with {model.vocab_size} tokens, tokenizer {model.tokenizer_hash}"
