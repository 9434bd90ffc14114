"""A scripted engine behind the real server on a real socket: records requests, and answers from a script.

engine = ScriptedEngine()
with ServerThread(engine) as server:       # or, inside a loop: async with serving(engine) as server
    ...  # connect a learner to server.endpoint
assert engine.calls[0] == "pause"
"""

import asyncio
import contextlib
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from inference_server.config import ServerConfig
from inference_server.engine.interface import (
    EngineDead,
    EngineFailed,
    EngineLimits,
    PushOrder,
    Sampled,
    WorkerInfo,
    WorkerReport,
)
from inference_server.server import Server
from protocol.channel.keys import ServerKeys
from protocol.channel.sockets import ServerChannel
from protocol.errors import ConfigError, PushError, PushInterrupted
from protocol.messages import Completion, ModelFingerprint, Sampling
from tests.fingerprint import MODEL

LIMITS = EngineLimits(max_model_len=64, vocab_size=32, dtype="float32", num_workers=1, max_concurrent_sequences=256)

Complete = Callable[[list[int], int], list[int]]
"""Returns the tokens of a completion, given the prompt and the index in the group."""


def count_up(prompt: list[int], index: int) -> list[int]:
    """The default script: a completion of index + 1 tokens."""
    return [(prompt[-1] + 1 + i) % LIMITS.vocab_size for i in range(index + 1)]


class ScriptedEngine:
    """Implements the Engine interface. By default it samples with `complete` and receives pushes over tcp."""

    def __init__(self, complete: Complete = count_up, limits: EngineLimits = LIMITS, logprob: float = -0.5) -> None:
        self.limits = limits
        self.complete, self.logprob = complete, logprob
        self.calls: list[str] = []
        """Names of the control calls, in order."""
        self.prompts: list[list[int]] = []
        self.name = uuid.uuid4().hex[:8]
        """Part of the salts that the engine returns."""
        self.salts: list[str] = []
        """Salts of the requested groups."""
        self.cancelled = 0
        self.version: int | None = None
        self.weights: dict[str, Any] = {}
        """Tensors of the last push, by name."""
        self.orders: list[PushOrder] = []
        self.scripted_reports: list[Sequence[WorkerReport]] = []
        """When set, pushes return these reports in order, without any transport."""
        self.reports_from_version: dict[int, Sequence[WorkerReport]] = {}
        """Fixed reports of the pushes of these versions."""
        self.fail_with: EngineFailed | EngineDead | None = None
        """When set, generate, score and pause raise it."""
        self.release = asyncio.Event()
        """Clear to hold completions back, set to release them."""
        self.release.set()
        self.release_pause = asyncio.Event()
        self.release_pause.set()
        self.num_steps: list[int | None] = [0] * limits.num_replicas
        self.restart_fails = False
        self.release_restart = asyncio.Event()
        """Clear to hold the next engine back."""
        self.release_restart.set()
        self._open = asyncio.Event()
        self._open.set()
        self._receiver: Any = None

    async def workers(self) -> Sequence[WorkerInfo]:
        return [WorkerInfo(device="cpu", transports=["tcp"], pid=os.getpid())] * self.limits.num_workers

    async def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        self.salts.append(salt)
        completions, version = await self.sample(prompt_token_ids, sampling)
        self.num_steps = [(count or 0) + 1 for count in self.num_steps]
        salt = salt or f"{self.name} version {version}"
        yield Sampled(entered_version=version, salt=salt, completions=dict(enumerate(completions)))

    async def sample(self, prompt_token_ids: np.ndarray, sampling: Sampling) -> tuple[list[Completion], int]:
        """Return all completions of a group together, and the version they entered under."""
        self.prompts.append(prompt_token_ids.tolist())
        try:
            await self._open.wait()
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self._maybe_fail()
        if self.version is None:
            raise EngineDead("the engine that started this request has died")
        return self._completions(prompt_token_ids.tolist(), sampling), self.version

    def _completions(self, prompt: list[int], sampling: Sampling) -> list[Completion]:
        return [self._completion(prompt, index, sampling) for index in range(sampling.num_completions)]

    def _completion(self, prompt: list[int], index: int, sampling: Sampling) -> Completion:
        tokens = self.complete(prompt, index)
        kept = tokens[: sampling.max_tokens]
        return Completion(
            token_ids=np.array(kept, dtype=np.int32),
            behavior_logprobs=np.full(len(kept), self.logprob, dtype=np.float32),
            versions=[(self.version, len(kept))] if kept else [],  # type: ignore[list-item]
            finish_reason="stop" if len(tokens) <= sampling.max_tokens else "length",
        )

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        await self.release.wait()
        self._maybe_fail()
        return np.full(len(token_ids) - 1, self.logprob, dtype=np.float32), self.version

    async def pause(self) -> None:
        self.calls.append("pause")
        self._maybe_fail()
        await self.release_pause.wait()
        self._open.clear()

    async def resume(self) -> None:
        self.calls.append("resume")
        self._open.set()

    async def stage_push(self, order: PushOrder) -> Sequence[WorkerReport]:
        self.calls.append("stage_push")
        if self.scripted_reports:
            return self.scripted_reports.pop(0)
        receiver = self._own_receiver()
        receiver.stage(order)
        while receiver.is_staging:
            await asyncio.sleep(0.005)
        if receiver.failure is not None:
            return [
                report(
                    ok=False,
                    state="receiving",
                    error=str(receiver.failure),
                    interrupted=isinstance(receiver.failure, PushInterrupted),
                )
            ]
        return [report(state="received", checksum=receiver.checksum)]

    async def load_push(self, order: PushOrder) -> Sequence[WorkerReport]:
        self.calls.append("load_push")
        self.orders.append(order)
        if self.scripted_reports:
            return self.scripted_reports.pop(0)
        if order.version in self.reports_from_version:
            return self.reports_from_version[order.version]
        return [await asyncio.to_thread(self._load, order)]

    def _load(self, order: PushOrder) -> WorkerReport:
        weights: dict[str, Any] = {}
        receiver, is_intact = self._own_receiver(), True
        try:
            for arrived in receiver.buckets(order):
                is_intact = False
                self._take(arrived.bucket.views(arrived.buffer), weights)
        except PushError as error:
            receiver.leave()
            return report(
                ok=False,
                state="receiving",
                weights_intact=is_intact,
                error=str(error),
                interrupted=isinstance(error, PushInterrupted),
            )
        self.weights = weights
        return report(checksum=receiver.checksum, receive_s=receiver.receive_s)

    def _take(self, views: Iterable[tuple[str, Any]], weights: dict[str, Any]) -> None:
        """Add a bucket's tensors, which are valid only during the call, to the weights of the push."""
        weights.update((name, tensor.clone()) for name, tensor in views)

    def _own_receiver(self) -> Any:
        import torch

        from inference_server.engine.weight_receiver import Receiver

        if self._receiver is None:
            self._receiver = Receiver(0, torch.device("cpu"))
        return self._receiver

    async def leave_session(self, session: str) -> None:
        self.calls.append(f"leave_session {session}")
        self._leave(session)

    async def set_version(self, version: int) -> None:
        self.calls.append(f"set_version {version}")
        self.version = version

    async def opened(self) -> None:
        """Wait while the engine is paused."""
        await self._open.wait()

    def check_alive(self) -> None:
        if isinstance(self.fail_with, EngineDead):
            raise self.fail_with

    async def restart(self) -> None:
        self.calls.append("restart")
        await self.release_restart.wait()
        if self.restart_fails:
            raise ConfigError("out of memory")
        self.fail_with, self.version, self.weights = None, None, {}
        self._open.set()
        self._leave()

    def close(self) -> None:
        self.calls.append("close")
        self._leave()

    def _maybe_fail(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with

    def _leave(self, session: str | None = None) -> None:
        if self._receiver is not None:
            self._receiver.leave(session)


def report(**changes: Any) -> WorkerReport:
    """Return a worker's report of a successful push, with changes."""
    good = WorkerReport(rank=0, ok=True, state="done", weights_intact=True, checksum="c0ffee")
    return msgspec.structs.replace(good, **changes)


class Serving(msgspec.Struct):
    """A running server and its endpoint."""

    server: Server
    endpoint: str
    task: asyncio.Task[None]


@contextlib.asynccontextmanager
async def serving(
    engine: ScriptedEngine,
    config: ServerConfig = ServerConfig(),  # noqa: B008  (frozen)
    model: ModelFingerprint = MODEL,
    endpoint: str = "tcp://127.0.0.1:*",
    keys: ServerKeys | None = None,
    model_digest: str = "",
) -> AsyncIterator[Serving]:
    """Run the real server on a scripted engine in the current loop."""
    channel = ServerChannel(endpoint, keys)
    server = Server(channel, engine, model, config, model_digest)
    task = asyncio.create_task(server.serve())
    try:
        yield Serving(server=server, endpoint=channel.endpoint, task=task)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineDead):
            await task
        channel.close()
        engine.close()


class ServerThread:
    """A server in its own thread, for learners with their own event loop or none."""

    def __init__(self, engine: ScriptedEngine, **options: Any) -> None:
        self.engine, self._options = engine, options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.endpoint = ""

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self.engine, **self._options) as running:
            self.endpoint, self.running = running.endpoint, running
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        assert self._ready.wait(timeout=60), "the scripted server did not start within 60 s"
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.die()
            self._thread.join(timeout=60)

    def drain(self) -> Future[None]:
        """Drain as after a signal, then end. Thread-safe."""
        return asyncio.run_coroutine_threadsafe(self._drain(), self._loop)

    async def _drain(self) -> None:
        await self.running.server.drain.run()
        self._stop.set()

    def die(self) -> None:
        """End without a message to the learner. Thread-safe."""
        self._loop.call_soon_threadsafe(self._stop.set)
