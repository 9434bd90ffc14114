"""Rollouts: keeps the server busy within the staleness bound and hands out scored groups in slot order.

    loop           consumes              produces                        waits for                    unblocked by
    _admit         prompts, by slot      ledger: admitted, Generate      room under the admission     publish (a new version),
                                                                         rule, a server with weights  a slot given up
    link.run       messages              groups to _on_group             the server                   the server
    _receive       Group                 ledger: received, then Ack,     the reward workers           a reward or its timeout
                                         ledger: scored, ready groups
    take (main     ready groups,         the batch of one step           the next groups in slot      _receive
    thread)        in slot order                                         order

A slot is a place in the endless sequence of prompts. Groups are taken strictly in slot order: that makes the staleness
bound exact, keeps long completions from being overtaken, and makes the batches the same after a resume.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec
import numpy as np

from learner.admission import num_slots_allowed
from learner.batch import ScoredGroup
from learner.config import LearnerRun
from learner.data import Prompt, Prompts
from learner.ledger import Ledger
from learner.link import ServerLink
from learner.loop_thread import LoopThread
from learner.scoring import Scorer
from protocol.codec import pack
from protocol.errors import DataError, DeadlineExceeded, ProtocolError
from protocol.messages import Generate, Group, GroupFailed, Hello, Sampling, Welcome

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A group the server owes us."""

    group_id: str
    slot: int
    attempt: int
    prompt: Prompt


class Rollouts:
    """Runs in the loop thread; `take`, `publish` and `wait_for_server` are the main thread's side."""

    def __init__(
        self, run: LearnerRun, hello: Hello, prompts: Prompts, ledger: Ledger, scorer: Scorer, version: int
    ) -> None:
        self._run, self._config = run, run.learner
        self._prompts, self._ledger, self._scorer = prompts, ledger, scorer
        self._version = version
        self._served_by: str | None = None
        """The server that has this run's weights."""
        self._outstanding: dict[str, Request] = {}
        self._unsent: list[Request] = []
        """Of the outstanding: those a resume found beyond the admission rule; they wait for it like new ones."""
        self._scoring: set[int] = set()
        self._ready: dict[int, ScoredGroup] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._next_slot = ledger.next_slot()
        self._next_slot_to_take = ledger.next_slot_to_consume()
        self._given_up = set(ledger.given_up_slots())
        self._num_failures: Counter[int] = Counter()
        """By slot."""
        self.thread = LoopThread("rollouts")
        self.link = self.thread.call(self._open_link(hello), CALL_TIMEOUT_S)
        self.thread.call(self._start(), CALL_TIMEOUT_S)

    # --- the main thread's side ----------------------------------------------------------------------------------

    def wait_for_server(self, timeout_s: float) -> Welcome:
        """Block until the server has welcomed this run. Raises DeadlineExceeded, HandshakeRefused."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self.link.connected:
                self._raise_failure()
                if not self._changed.wait(min(0.5, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise self.no_server(timeout_s)
        assert self.link.welcome is not None
        return self.link.welcome

    def no_server(self, timeout_s: float) -> DeadlineExceeded:
        """The error for a server that has not answered for `timeout_s`."""
        return DeadlineExceeded(
            f"no inference server answers at {self._run.endpoint} after {timeout_s:.0f} s; start one with "
            "`inference-server run.toml`, check `endpoint`, or raise learner.connect_timeout_s"
        )

    def publish(self, version: int, server_id: str) -> None:
        """The server `server_id` now generates with `version`: admit what the rule allows."""
        self._version = version
        self.thread.loop.call_soon_threadsafe(self._published, server_id)

    def take(self, num_groups: int, timeout_s: float) -> list[ScoredGroup] | None:
        """Return the next groups in slot order, or None if they are not there within `timeout_s`.

        Raises what stopped the rollouts: RewardError, DataError, HandshakeRefused, LedgerError.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_failure()
                slots = self._head(num_groups)
                if slots is not None and not self._drop_stale(slots):
                    self._next_slot_to_take = slots[-1] + 1
                    return [self._ready.pop(slot) for slot in slots]
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None

    @property
    def waits_for(self) -> str:
        """In words, what the next batch waits for."""
        if not self.link.connected:
            return f"the server at {self._run.endpoint}"
        if self._scoring:
            return f"{len(self._scoring)} groups to be scored"
        return f"{len(self._outstanding)} groups from the server"

    def close(self) -> None:
        """Let the server forget what was asked for; the ledger remembers it for a resume."""
        if self.link.connected:
            self.thread.call(self.link.cancel(list(self._outstanding)), CALL_TIMEOUT_S)
        self.thread.stop()
        self.link.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _head(self, num_groups: int) -> list[int] | None:
        """The next `num_groups` slots that are not given up, if all of them are ready."""
        slots: list[int] = []
        slot = self._next_slot_to_take
        while len(slots) < num_groups:
            if slot in self._ready:
                slots.append(slot)
            elif slot not in self._given_up:
                return None
            slot += 1
        return slots

    def _drop_stale(self, slots: list[int]) -> bool:
        """The exception to the bound (a failed push, a resume): drop, count and ask again; True if there were any."""
        oldest_allowed = self._version - self._config.max_staleness
        stale = [slot for slot in slots if self._ready[slot].oldest_version < oldest_allowed]
        for slot in stale:
            group = self._ready.pop(slot)
            age = self._version - group.oldest_version
            log.warning("group %s is %d versions old; asking for it again", group.group_id, age)
            self.thread.loop.call_soon_threadsafe(self._spawn, self._ask_again(group.group_id, slot, "stale"))
        return bool(stale)

    # --- the loop thread's side ----------------------------------------------------------------------------------

    async def _open_link(self, hello: Hello) -> ServerLink:
        return ServerLink(self._run.endpoint, hello, on_group=self._on_group, on_welcome=self._on_welcome)

    async def _start(self) -> None:
        """Take up every group where the ledger has it (a new run has none), then begin."""
        for row in self._ledger.outstanding():
            if row.state == "admitted":
                prompt = self._prompts.prompt_at(row.slot)
                request = Request(group_id=row.group_id, slot=row.slot, attempt=row.attempt, prompt=prompt)
                self._outstanding[row.group_id] = request
                self._unsent.append(request)
            elif row.state == "received":
                self._spawn(self._score(row.slot, self._scorer.received(row)))
            else:
                self._ready[row.slot] = self._scorer.scored(row)
        self._unsent += [self._request(row.slot, row.attempt + 1) for row in self._ledger.retries_due()]
        for work in (self.link.run(), self._admit()):
            self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background; one that fails ends the run: the main thread raises the error at its next wait."""
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself keeps only a weak reference
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is not None:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.server_id == self._served_by:
            self._send_again()
        with self._changed:
            self._changed.notify_all()

    def _published(self, served_by: str) -> None:
        if served_by != self._served_by:
            self._served_by = served_by
            self._send_again()
        self._wake.set()

    def _send_again(self) -> None:
        """All that was sent and has not come; an id the server still knows costs it nothing."""
        self._spawn(self._send([request for request in self._outstanding.values() if request not in self._unsent]))

    async def _admit(self) -> None:
        """Send prompts whenever the rule has room and the server has this run's weights."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            num_slots = num_slots_allowed(
                version=self._version,
                max_staleness=self._config.max_staleness,
                groups_per_step=self._config.groups_per_step,
                total_groups=self._config.steps * self._config.groups_per_step,
                num_given_up=len(self._given_up),
            )
            with self._ledger.batch():
                new = [self._request(slot, attempt=0) for slot in range(self._next_slot, num_slots)]
            self._next_slot = max(self._next_slot, num_slots)
            waiting = self._unsent + new
            self._unsent = [request for request in waiting if request.slot >= num_slots]
            await self._send([request for request in waiting if request.slot < num_slots])

    def _request(self, slot: int, attempt: int) -> Request:
        prompt = self._prompts.prompt_at(slot)
        request = Request(group_id=f"{slot}.{attempt}", slot=slot, attempt=attempt, prompt=prompt)
        epoch = self._prompts.epoch_of(slot)
        self._ledger.admit(request.group_id, slot, attempt, epoch, prompt.prompt_id, self._version)
        self._outstanding[request.group_id] = request
        return request

    async def _send(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if not await self.link.generate(self._generate(request)):
                return  # all that is outstanding is sent again when the server is back

    def _generate(self, request: Request) -> Generate:
        sampling = self._config.sampling
        seed = (
            (self._run.seed * 1_000_003 + request.slot * sampling.num_completions) % 2**31 if sampling.seeded else None
        )
        return Generate(
            group_id=request.group_id,
            prompt_token_ids=np.array(request.prompt.token_ids, np.int32),
            sampling=Sampling(
                num_completions=sampling.num_completions,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=seed,
            ),
            deadline_s=self._config.group_deadline_s,
        )

    def _on_group(self, message: Group | GroupFailed) -> None:
        if isinstance(message, Group):
            self._spawn(self._receive(message))
            return
        request = self._outstanding.get(message.group_id)
        match message:
            case GroupFailed(retryable=False) if request is not None:
                raise DataError(f"the server cannot complete prompt {request.prompt.prompt_id}: {message.message}")
            case GroupFailed(code="not_ready"):
                pass  # it is sent again after the next push
            case GroupFailed() if request is not None:
                log.warning("group %s failed (%s): %s", message.group_id, message.code, message.message)
                del self._outstanding[request.group_id]
                self._num_failures[request.slot] += 1
                self._spawn(self._ask_again(request.group_id, request.slot, message.code))

    async def _ask_again(self, group_id: str, slot: int, reason: str) -> None:
        """Drop a group and ask for its prompt under the next attempt, or give the slot up."""
        if self._num_failures[slot] < self._config.max_group_attempts:
            self._ledger.drop(group_id, reason)
            attempt = int(group_id.partition(".")[2])
            await self._send([self._request(slot, attempt + 1)])
            return
        self._ledger.drop(group_id, "failed")
        log.error(
            "the prompt of slot %d is given up after %d failures (learner.max_group_attempts)",
            slot,
            self._num_failures[slot],
        )
        with self._changed:
            self._given_up.add(slot)
            self._changed.notify_all()
        self._wake.set()

    async def _receive(self, group: Group) -> None:
        """Commit a group, then acknowledge it, then score it. A duplicate is only acknowledged."""
        request = self._outstanding.pop(group.group_id, None)
        if request is not None:
            self._unsent = [other for other in self._unsent if other is not request]
            self._check(group)
            num_tokens = sum(len(completion.token_ids) for completion in group.completions)
            self._ledger.receive(group.group_id, pack(group), group.oldest_version, num_tokens)
        await self.link.acknowledge([group.group_id])
        if request is not None:
            await self._score(request.slot, group)

    def _check(self, group: Group) -> None:
        wanted = self._config.sampling.num_completions
        if len(group.completions) != wanted:
            raise ProtocolError(
                f"group {group.group_id} has {len(group.completions)} completions, asked for were {wanted}"
            )
        if not all(len(completion.token_ids) for completion in group.completions):
            raise ProtocolError(f"group {group.group_id} has a completion without tokens; expected at least one")

    async def _score(self, slot: int, group: Group) -> None:
        self._scoring.add(slot)
        scored = await self._scorer.score(slot, group)
        with self._changed:
            self._scoring.discard(slot)
            self._ready[slot] = scored
            self._changed.notify_all()
