"""Answers to a doctor: server info, and one transfer test at a time.

Invariant: a probe changes nothing about the run that is served.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future

from inference_server.engine.containment import run_contained
from inference_server.engine.interface import Engine
from inference_server.engine.supervisor import EngineSupervisor
from protocol.channel.sockets import ServerChannel
from protocol.doctor import package_version
from protocol.messages import PROTOCOL_VERSION, ModelFingerprint, Probe, ServerInfo, Trial, TrialResult

log = logging.getLogger(__name__)


class ProbeHandler:
    """Message handlers for doctors, with or without a served run."""

    def __init__(self, channel: ServerChannel, engine: Engine, model: ModelFingerprint, life: EngineSupervisor) -> None:
        self._channel, self._engine, self._model, self._life = channel, engine, model, life
        self._is_testing = False

    async def answer(self, peer: bytes, probe: Probe, run: str | None) -> None:
        """Send the server info. `run` is the run that is served."""
        server_info = ServerInfo(
            probe_id=probe.probe_id,
            protocol_version=PROTOCOL_VERSION,
            package_version=package_version(),
            clock_s=time.time(),
            run=run,
            model=self._model,
            dtype=self._engine.limits.dtype,
            quantization=self._engine.limits.quantization,
            transports=self._life.transports,
            devices=[worker.device for worker in self._life.workers],
        )
        await self._channel.send(peer, server_info)

    async def try_transfer(self, peer: bytes, trial: Trial) -> None:
        """Receive the bytes of a transfer test in a thread, and report the result."""

        def fail(why: str) -> Awaitable[object]:
            return self._channel.send(peer, TrialResult(trial_id=trial.trial_id, error=why))

        await run_contained(self._try_transfer(peer, trial), "testing the weight transfer", fail)

    async def _try_transfer(self, peer: bytes, trial: Trial) -> None:
        if self._is_testing:
            ended = TrialResult(trial_id=trial.trial_id, error="another transfer test is running on this server")
        else:
            self._is_testing = True
            try:
                ended = await asyncio.wrap_future(_start_trial(trial))
            finally:
                self._is_testing = False
        await self._channel.send(peer, ended)


def _start_trial(trial: Trial) -> Future[TrialResult]:
    """Run the trial in a daemon thread, because a thread of the event loop's pool would delay the server's exit."""
    result: Future[TrialResult] = Future()
    result.set_running_or_notify_cancel()
    threading.Thread(target=lambda: result.set_result(_run_trial(trial)), name="trial", daemon=True).start()
    return result


def _run_trial(trial: Trial) -> TrialResult:
    try:
        from protocol.transports.trial import receive_trial  # imports torch

        return TrialResult(trial_id=trial.trial_id, receive_s=receive_trial(trial))
    except Exception as error:
        # The peer chose the address, so any failure is reported to the peer and must not stop the server.
        log.info("transfer test failed: %s", error)
        return TrialResult(trial_id=trial.trial_id, error=str(error) or repr(error))
