"""One weight push after another, seen from the server: the other half is learner/push.py.

    learner: PushBegin ─▶ pausing ─▶ PushReady ─▶ receiving (worker RPC) ─▶ resuming ─▶ idle ─▶ PushDone
                             │                          │
                             └──── weights intact ──────┤ PushFailed, generation goes on with the old weights
                                                        └ weights torn: PushFailed, paused until a whole push succeeds

Consumes PushBegin and PushAbort; waits for the engine and for the learner's bytes, each with a deadline; a new push waits
for the one before it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Literal, TypeVar

from inference_server.engine import Engine, PushOrder, WorkerReport
from inference_server.groups import Deliver
from protocol.messages import PushAbort, PushBegin, PushDone, PushFailed, PushReady

log = logging.getLogger(__name__)

T = TypeVar("T")

PushState = Literal["idle", "pausing", "receiving", "resuming", "torn"]


class _Failed(Exception):
    """A push that did not complete, with the reason for the learner."""


class Pushes:
    """Runs pushes and knows which policy version the engine serves."""

    def __init__(self, engine: Engine, deliver: Deliver, pause_timeout_s: float) -> None:
        self._engine, self._deliver, self._pause_timeout_s = engine, deliver, pause_timeout_s
        self._lock = asyncio.Lock()
        self._epoch: str | None = None
        self._aborted_epochs: set[str] = set()
        self._epoch_timeout_s = 0.0
        self._weights_intact = True
        self._num_runs = 0
        self.version: int | None = None
        self.state: PushState = "idle"
        self.num_done = self.num_failed = 0
        self.stall_s = 0.0

    def forget_version(self) -> None:
        """The weights are of a run that is over: the next learner must push before it asks for groups."""
        self.version = None
        self._num_runs += 1

    async def push(self, begin: PushBegin) -> None:
        """Run one push to its PushDone or PushFailed."""
        async with self._lock:
            try:
                outcome: PushDone | PushFailed = await self._run(begin)
                self.num_done += 1
            except _Failed as failure:
                outcome = await self._give_up(begin, str(failure))
            await self._deliver(outcome)

    async def abort(self, abort: PushAbort) -> None:
        """Leave an epoch. A push that is receiving ends by itself: the learner has closed its side."""
        self._aborted_epochs.add(abort.epoch)
        async with self._lock:
            if abort.epoch == self._epoch:
                self._epoch = None
                try:
                    await self._within(
                        self._engine.leave_epoch(abort.epoch), self._pause_timeout_s, "server.pause_timeout_s"
                    )
                except _Failed as failure:
                    log.warning("epoch %s was not left: %s", abort.epoch, failure)

    async def _run(self, begin: PushBegin) -> PushDone:
        self._enter_epoch(begin)
        run = self._num_runs
        started = time.monotonic()
        self.state = "pausing"
        await self._within(self._engine.pause(), self._pause_timeout_s, "server.pause_timeout_s")
        paused = time.monotonic()
        self.state = "receiving"
        if not await self._deliver(PushReady(epoch=begin.epoch, version=begin.version)):
            raise _Failed("the learner could not be reached for PushReady")
        order = PushOrder(
            epoch=begin.epoch, version=begin.version, rendezvous=begin.rendezvous, manifest=begin.manifest
        )
        # A worker has this long to join and again to receive; past both it is stuck.
        receive_timeout_s = 2 * self._epoch_timeout_s + 5
        reports = await self._within(self._receive(order), receive_timeout_s, "2 x learner.push.timeout_s + 5")
        checksum = self._agreed_checksum(reports)
        self.state = "resuming"
        await self._within(self._engine.set_version(begin.version), self._pause_timeout_s, "server.pause_timeout_s")
        self._weights_intact = True
        self.version = begin.version if run == self._num_runs else None
        await self._resume()
        stall_s = time.monotonic() - started
        self.stall_s += stall_s
        return PushDone(
            epoch=begin.epoch, version=begin.version, checksum=checksum, pause_s=paused - started,
            receive_s=max(report.join_s + report.receive_s for report in reports),
            load_s=max(report.load_s for report in reports), stall_s=stall_s,
        )  # fmt: skip

    def _enter_epoch(self, begin: PushBegin) -> None:
        if begin.epoch in self._aborted_epochs:
            raise _Failed(f"epoch {begin.epoch} was given up by the learner while the push waited")
        if begin.rendezvous is not None and begin.manifest is not None:
            self._epoch, self._epoch_timeout_s = begin.epoch, begin.rendezvous.timeout_s
        elif begin.epoch != self._epoch:
            raise _Failed(
                f"epoch {begin.epoch} came without rendezvous and manifest, and the server is in epoch {self._epoch}; "
                "begin a new epoch"
            )

    async def _receive(self, order: PushOrder) -> Sequence[WorkerReport]:
        # Until the reports say otherwise: a worker that is never heard of again may have loaded some layers.
        was_intact, self._weights_intact = self._weights_intact, False
        reports = await self._engine.receive_push(order)
        self._weights_intact = was_intact and all(report.weights_intact and not report.ok for report in reports)
        return reports

    def _agreed_checksum(self, reports: Sequence[WorkerReport]) -> str:
        failed = [
            f"worker {report.rank} failed while {report.state}: {report.error}" for report in reports if not report.ok
        ]
        checksums = {report.checksum for report in reports}
        if failed:
            raise _Failed("; ".join(failed))
        if len(checksums) != 1:
            raise _Failed(f"the workers received different bytes, checksums {sorted(checksums)}")
        return checksums.pop()

    async def _give_up(self, begin: PushBegin, reason: str) -> PushFailed:
        """Forget the epoch and let generation go on if it can."""
        failed_in = self.state
        self.num_failed += 1
        self._epoch = None
        log.warning("push of version %d failed while %s: %s", begin.version, failed_in, reason)
        if self._weights_intact and failed_in not in ("idle", "torn"):
            try:
                await self._resume()
            except _Failed as failure:
                reason = f"{reason}; and generation could not be resumed: {failure}"
        elif not self._weights_intact:
            self.state = "torn"
            log.warning("the weights are neither old nor new; generation waits for a whole push")
        return PushFailed(
            epoch=begin.epoch, version=begin.version, state=failed_in, message=reason,
            weights_intact=self._weights_intact,
        )  # fmt: skip

    async def _resume(self) -> None:
        await self._within(self._engine.resume(), self._pause_timeout_s, "server.pause_timeout_s")
        self.state = "idle"

    async def _within(self, call: Awaitable[T], timeout_s: float, knob: str) -> T:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError as error:
            raise _Failed(f"the engine did not answer within {timeout_s:g} s while {self.state} ({knob})") from error
