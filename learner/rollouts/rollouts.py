"""Rollouts: keeps the server busy within the staleness bound and hands out scored groups in slot order.

    loop           consumes              produces                        waits for                    unblocked by
    _admit         prompts, as the       ledger: admitted, Generate      room under the admission     publish (a new version),
                   curriculum has them                                   rule, a server with weights  a slot passed over
    link.run       messages              groups to _on_group             the server                   the server
    _receive       Group                 ledger: received, then Ack,     the reward workers           a reward or its timeout
                                         ledger: scored, ready groups,
                                         or dropped for want of signal
    take (main     ready groups,         the batch of one step           the next groups in slot      _receive
    thread)        in slot order                                         order

Groups are taken strictly in slot order: that makes the staleness bound exact, keeps long completions from being overtaken,
and makes the batches the same after a resume.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec

from learner.config import LearnerRun
from learner.prompts.curriculum import Curriculum
from learner.prompts.prompts import Prompts
from learner.rollouts.ledger import Ledger
from learner.rollouts.outstanding import Outstanding
from learner.rollouts.request import Request, message_of, survivors
from learner.rollouts.scored_group import ScoredGroup, rewards_of, scored_group
from learner.rollouts.scoring import Scorer
from learner.rollouts.selection import Selection
from learner.rollouts.slots import Slots, num_places_allowed
from learner.rollouts.waits import IN_WORDS, Part, Waits
from learner.servers.link import ServerLink
from learner.servers.loop_thread import LoopThread
from protocol.channel.keys import learner_keys
from protocol.codec import pack
from protocol.errors import DataError, DeadlineExceeded, ProtocolError, ServerLost
from protocol.messages import Group, GroupFailed, Hello, Welcome

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0


class Rollouts:
    """Runs in the loop thread; `take`, `publish` and `wait_for_server` are the main thread's side."""

    def __init__(
        self, run: LearnerRun, hello: Hello, prompts: Prompts, ledger: Ledger, scorer: Scorer, version: int
    ) -> None:
        self._run, self._config = run, run.learner
        self._prompts, self._ledger, self._scorer = prompts, ledger, scorer
        self._version, self._vocab_size = version, hello.model.vocab_size
        self._served_by: str | None = None
        """The server that has this run's weights."""
        self._outstanding = Outstanding(ledger, prompts, self._config.max_group_attempts)
        self._scoring: set[int] = set()
        self._changed = threading.Condition()
        """Held around every use of the slots, the curriculum and the waits; notified when a group moves on."""
        self._slots = Slots(ledger.next_slot(), ledger.next_slot_to_consume(), ledger.passed_over())
        reward = self._config.curriculum.reward or self._config.reward.names[0]
        self._curriculum = Curriculum(self._config.curriculum, reward, prompts, run.seed, ledger.next_position())
        self._selection = Selection(self._config, self._slots, self._curriculum)
        self._waits = Waits()
        self.batch_metrics: dict[str, float] = {}
        """What happened on the way to the batch that was taken last, and what it waited for."""
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.thread = LoopThread("rollouts")
        self.link = self.thread.call(self._open_link(hello), CALL_TIMEOUT_S)
        self.thread.call(self._start(), CALL_TIMEOUT_S)

    # --- the main thread's side ----------------------------------------------------------------------------------

    def wait_for_server(self, timeout_s: float, closing: threading.Event | None = None) -> Welcome:
        """Block until the server has welcomed this run. Raises DeadlineExceeded, HandshakeRefused, ServerLost when `closing`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self.link.connected:
                self._raise_failure()
                if closing is not None and closing.is_set():
                    raise ServerLost(f"the server at {self._run.endpoint} is no longer waited for: the learner ends")
                if not self._changed.wait(min(0.5, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise self.no_server(timeout_s)
        assert self.link.welcome is not None
        return self.link.welcome

    def no_server(self, timeout_s: float) -> DeadlineExceeded:
        """The error for a server that has not answered for `timeout_s`."""
        keys = " and `keys` (what listens there ends every handshake)" if self.link.handshakes_fail else ""
        return DeadlineExceeded(
            f"no inference server answers at {self._run.endpoint} after {timeout_s:.0f} s; start one with "
            f"`inference-server run.toml`, check `endpoint`{keys}, or raise learner.connect_timeout_s"
        )

    def publish(self, version: int, server_id: str) -> None:
        """The server `server_id` now generates with `version`: admit what the rule allows."""
        self._version = version
        self.thread.loop.call_soon_threadsafe(self._published, server_id)

    def take(self, num_groups: int, timeout_s: float, version: int) -> list[ScoredGroup] | None:
        """Return the next groups in slot order, or None if they are not there within `timeout_s`.

        `version` is the learner's, from which staleness counts; the server's may be older while a push is under way.

        Raises what stopped the rollouts: RewardError, DataError, HandshakeRefused, LedgerError.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_failure()
                slots = self._slots.head(num_groups)
                if slots is not None and not self._drop_stale(slots, version):
                    groups = self._selection.take(slots)
                    self.batch_metrics = self._selection.batch_metrics | self._waits.metrics()
                    self._waits = Waits()
                    return groups
                waits_for, now = self._waits_for(num_groups), time.monotonic()
                has_changed = self._changed.wait(max(0.0, deadline - now))
                self._waits.add(waits_for, time.monotonic() - now)
                if not has_changed:
                    return None

    def _waits_for(self, num_groups: int) -> Part:
        if not self.link.connected:
            return "link"
        missing = [slot for slot in self._slots.next(num_groups) if slot not in self._slots.ready]
        if any(slot < self._slots.next_to_admit and slot not in self._scoring for slot in missing):
            return "server"
        return "reward" if any(slot in self._scoring for slot in missing) else "push"

    @property
    def waits_for(self) -> str:
        """In words, what the next batch waits for."""
        with self._changed:
            part = self._waits_for(self._config.groups_per_step)
        match part:
            case "link":
                return f"the server at {self._run.endpoint}"
            case "server":
                return f"{len(self._outstanding)} groups from the server"
            case "reward":
                return f"{len(self._scoring)} groups to be scored"
            case "push":
                return IN_WORDS["push"]

    def close(self) -> None:
        """Let the server forget what was asked for; the ledger remembers it for a resume."""
        if self.link.connected:
            self.thread.call(self.link.cancel(self._outstanding.group_ids), CALL_TIMEOUT_S)
        self.thread.stop()
        self.link.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _drop_stale(self, slots: list[int], version: int) -> bool:
        """The exception to the bound (a failed push, a resume): drop, count and ask again; True if there were any."""
        oldest_allowed = version - self._config.max_staleness
        stale = [slot for slot in slots if self._slots.ready[slot].oldest_version < oldest_allowed]
        for slot in stale:
            group = self._slots.ready.pop(slot)
            age = version - group.oldest_version
            log.warning("group %s is %d versions old; asking for it again", group.group_id, age)
            self.thread.loop.call_soon_threadsafe(self._spawn, self._ask_again(group.group_id, slot, "stale"))
        return bool(stale)

    # --- the loop thread's side ----------------------------------------------------------------------------------

    async def _open_link(self, hello: Hello) -> ServerLink:
        run = self._run
        return ServerLink(
            run.endpoint, hello, on_group=self._on_group, on_welcome=self._on_welcome,
            keys=learner_keys(run.keys) if run.keys is not None else None, insecure=run.insecure,
        )  # fmt: skip

    async def _start(self) -> None:
        """Take up every group where the ledger has it (a new run has none), then begin."""
        with self._changed:
            for row in self._ledger.scored_rows() if self._curriculum.is_on else ():
                self._curriculum.note(row.slot, row.prompt_id, rewards_of(row).by_function)
            self._curriculum.count(self._slots.next_to_take)
            for row in self._ledger.outstanding():
                request = self._outstanding.request(row.slot, row.attempt, row.position)
                if row.state == "admitted":
                    self._outstanding.hold(request)
                elif row.state == "received":
                    self._spawn(self._score(request, self._scorer.received(row)))
                else:
                    self._slots.ready[row.slot] = self._scorer.scored(row, request.prompt)
        for row in self._ledger.retries_due():
            self._outstanding.hold(self._ask(row.slot, row.attempt + 1, row.position))
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
        self._spawn(self._send(self._outstanding.sent()))

    async def _admit(self) -> None:
        """Send prompts whenever the rule has room and the server has this run's weights."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._served_by is None:
                continue
            with self._changed, self._ledger.batch():
                num_places = num_places_allowed(
                    version=self._version,
                    max_staleness=self._config.max_staleness,
                    groups_per_step=self._config.groups_per_step,
                    total_groups=self._config.steps * self._config.groups_per_step,
                )
                new = [self._ask_new() for _ in range(self._slots.num_new(num_places))]
                due = self._outstanding.due(num_places, self._slots.place)
                self._changed.notify_all()
            await self._send(due + new)

    def _ask_new(self) -> Request:
        slot = self._slots.next_to_admit
        request = self._ask(slot, 0, self._curriculum.ask())
        self._slots.next_to_admit = slot + 1
        return request

    def _ask(self, slot: int, attempt: int, position: int) -> Request:
        return self._outstanding.ask(slot, attempt, position, self._version)

    async def _send(self, requests: Iterable[Request]) -> None:
        config = self._config
        for request in requests:
            message = message_of(request, config.sampling, self._run.seed, config.group_deadline_s)
            request.sent_at = time.monotonic()
            if not await self.link.generate(message):
                return  # all that is outstanding is sent again when the server is back

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
                self._outstanding.pop(request.group_id)
                self._spawn(self._failed(request, message.code))

    async def _failed(self, request: Request, reason: str) -> None:
        self._outstanding.count_failure(request.slot)
        await self._ask_again(request.group_id, request.slot, reason)

    async def _ask_again(self, group_id: str, slot: int, reason: str) -> None:
        """Drop a group and ask for its prompt under the next attempt, or give the slot up."""
        request = self._outstanding.ask_again(group_id, slot, reason, self._version)
        if request is not None:
            await self._send([request])
            return
        with self._changed:
            self._slots.passed_over[slot] = "failed"
            self._changed.notify_all()
        self._wake.set()

    async def _receive(self, group: Group) -> None:
        """Commit a group, then acknowledge it, then score it. A duplicate is only acknowledged."""
        request = self._outstanding.pop(group.group_id)
        if request is None:
            await self.link.acknowledge([group.group_id])
            return
        if request.sent_at is not None:
            with self._changed:
                self._waits.note_arrival(time.monotonic() - request.sent_at, group.server_s)
        usable, reason = None, "too_few_survivors"
        try:
            usable = survivors(group, self._config.sampling, self._vocab_size)
        except ProtocolError as error:
            self.link.refuse(str(error))
            reason = "malformed"
        if usable is None:
            log.warning("group %s cannot be used: %s", group.group_id, reason)
            await self._failed(request, reason)
            await self.link.acknowledge([group.group_id])
            return
        num_tokens = sum(len(completion.token_ids) for completion in usable.completions)
        self._ledger.receive(group.group_id, pack(usable), usable.oldest_version, num_tokens)
        await self.link.acknowledge([group.group_id])
        await self._score(request, usable)

    async def _score(self, request: Request, group: Group) -> None:
        slot, prompt = request.slot, request.prompt
        with self._changed:
            self._scoring.add(slot)
            self._changed.notify_all()
        rewards = await self._scorer.score(prompt, group)
        with self._changed:
            self._selection.count(rewards)
        if rewards.is_unscorable:
            self._scoring.discard(slot)
            await self._failed(request, "unscorable")
            return
        scored = scored_group(slot, prompt, group, rewards)
        # Replaced here and not when its turn comes, so that the replacement starts at once. Score and drop are one commit:
        # a resume never decides again, and so consumes the same groups.
        with self._changed, self._ledger.batch():
            self._ledger.score(group.group_id, msgspec.json.encode(rewards).decode(), rewards.mean)
            self._curriculum.note(slot, prompt.prompt_id, rewards.by_function)
            if not self._selection.admits(scored):
                self._ledger.drop(group.group_id, "no_signal")
            self._scoring.discard(slot)
            self._changed.notify_all()
        self._wake.set()
