"""Rollouts: keeps the server busy within the staleness bound and hands out scored groups in slot order.

    loop           consumes              produces                        waits for                    unblocked by
    _admit         prompts, as the       ledger: admitted, Generate      room under the admission     publish (a new version),
                   queue has them                                        rule, a server with weights  a slot passed over
    link.run       messages              groups to _on_group             the server                   the server
    _receive       Groups, as many as    ledger: received, then Ack      the disk, in a thread        its commit
                   have come
    _score         a Group               its rewards                     the reward workers           a reward or its timeout
    _book          rewards, likewise     the queue: ready groups, or     the disk, in a thread        its commit
                                         dropped for want of signal
    take (main     the queue             the batch of one step           the next groups in slot      _book
    thread)                                                              order

Groups are taken strictly in slot order: that makes the staleness bound exact, keeps long completions from being overtaken,
and makes the batches the same after a resume. What is shared between the threads is in queue.py; here is what is awaited.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

from learner.config import LearnerRun
from learner.rewards.scoring import Scorer
from learner.rollouts.ledger import Ledger
from learner.rollouts.outstanding import Outstanding
from learner.rollouts.queue import GroupQueue, Scored
from learner.rollouts.request import Request, message_of, survivors
from learner.rollouts.scored_group import ScoredGroup, recalled, received, scored_group
from learner.rollouts.together import Together
from learner.rollouts.waits import IN_WORDS
from learner.servers.connection import Connection
from protocol.codec import pack
from protocol.errors import DataError, ProtocolError
from protocol.messages import Group, GroupFailed, Welcome

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.2
"""How soon a failure in the background ends the main thread's wait."""


class Rollouts:
    """Runs in the connection's loop; `take` and `publish` are the main thread's side."""

    def __init__(
        self,
        run: LearnerRun,
        connection: Connection,
        queue: GroupQueue,
        outstanding: Outstanding,
        scorer: Scorer,
        ledger: Ledger,
    ) -> None:
        self._run, self._config = run, run.learner
        self._connection, self._link, self._loop = connection, connection.link, connection.loop
        self._queue, self._outstanding, self._scorer, self._ledger = queue, outstanding, scorer, ledger
        self._version = 0
        self._served_by: str | None = None
        """The server that has this run's weights."""
        self._wake = asyncio.Event()
        self._arrived = Together(self._receive)
        self._scored = Together(self._book)

    # --- the main thread's side ----------------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """Take up every group where the ledger has it (a new run has none) and greet the server."""
        self._version = version
        self._take_up()
        self._connection.start(self._on_group, self._on_welcome)
        for work in (self._admit(), self._arrived.run(), self._scored.run()):
            self._loop.spawn(work)

    def publish(self, version: int, server_id: str) -> None:
        """The server `server_id` now generates with `version`: admit what the rule allows."""
        self._version = version
        self._loop.call_soon(self._published, server_id)

    def take(self, version: int, timeout_s: float) -> list[ScoredGroup] | None:
        """Return the groups of the next step in slot order, or None if they are not there within `timeout_s`.

        `version` is the learner's, from which staleness counts; the server's may be older while a push is under way.

        Raises what stopped the rollouts: RewardError, DataError, HandshakeRefused, LedgerError.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._loop.raise_failure()
            remaining_s = deadline - time.monotonic()
            groups = self._queue.take(
                version, min(LOOK_EVERY_S, max(0.0, remaining_s)),
                is_connected=self._link.connected, on_stale=lambda group: self._too_old(group, version),
            )  # fmt: skip
            if groups is not None or remaining_s <= 0:
                return groups

    @property
    def batch_metrics(self) -> dict[str, float]:
        """What happened on the way to the batch that was taken last, and what it waited for."""
        return self._queue.batch_metrics

    @property
    def waits_for(self) -> str:
        """In words, what the next batch waits for."""
        part, num_scoring = self._queue.lacks(is_connected=self._link.connected)
        match part:
            case "link":
                return f"the server at {self._run.endpoint}"
            case "server":
                return f"{len(self._outstanding)} groups from the server"
            case "reward":
                return f"{num_scoring} groups to be scored"
            case "push":
                return IN_WORDS["push"]

    def close(self) -> None:
        """Let the server forget what was asked for; the ledger remembers it for a resume."""
        if self._link.connected:
            self._loop.call(self._link.cancel(self._outstanding.group_ids), CALL_TIMEOUT_S)

    def _take_up(self) -> None:
        for row in self._ledger.outstanding():
            request = self._outstanding.request(row.slot, row.attempt, row.position)
            if row.state == "admitted":
                self._outstanding.hold(request)
            elif row.state == "received":
                self._loop.spawn(self._score(request, received(self._ledger, row)))
            else:
                self._queue.put_back(recalled(self._ledger, row, request.prompt))
        for row in self._ledger.retries_due():
            self._outstanding.hold(self._outstanding.ask(row.slot, row.attempt + 1, row.position, self._version))

    def _too_old(self, group: ScoredGroup, version: int) -> None:
        age = version - group.oldest_version
        log.warning("group %s is %d versions old; asking for it again", group.group_id, age)
        self._loop.spawn(self._ask_again(group.group_id, group.slot, "stale"))

    # --- the loop thread's side ----------------------------------------------------------------------------------

    def _on_welcome(self, welcome: Welcome) -> None:
        self._queue.note_capacity(welcome.max_concurrent_sequences)
        if welcome.server_id == self._served_by:
            self._send_again()

    def _published(self, served_by: str) -> None:
        if served_by != self._served_by:
            self._served_by = served_by
            self._send_again()
        self._wake.set()

    def _send_again(self) -> None:
        """All that was sent and has not come; an id the server still knows costs it nothing."""
        self._loop.spawn(self._send(self._outstanding.sent()))

    async def _admit(self) -> None:
        """Send prompts whenever the rule has room and the server has this run's weights."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._served_by is not None:
                await self._send(self._queue.admit(self._outstanding, self._version))

    async def _send(self, requests: Iterable[Request]) -> None:
        config = self._config
        for request in requests:
            message = message_of(request, config.sampling, self._run.seed, config.group_deadline_s)
            request.sent_at = time.monotonic()
            if not await self._link.generate(message):
                return  # all that is outstanding is sent again when the server is back

    def _on_group(self, message: Group | GroupFailed) -> None:
        if isinstance(message, Group):
            self._arrived.put(message)
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
                self._loop.spawn(self._failed(request, message.code))

    async def _failed(self, request: Request, reason: str) -> None:
        self._outstanding.count_failure(request.slot)
        await self._ask_again(request.group_id, request.slot, reason)

    async def _ask_again(self, group_id: str, slot: int, reason: str) -> None:
        """Drop a group and ask for its prompt under the next attempt, or give the slot up."""
        request = self._outstanding.ask_again(group_id, slot, reason, self._version)
        if request is not None:
            await self._send([request])
            return
        self._queue.fail(slot)
        self._wake.set()

    async def _receive(self, groups: list[Group]) -> None:
        """Commit groups, then acknowledge them, then score them. A duplicate is only acknowledged."""
        usable: list[tuple[Request, Group]] = []
        for group in groups:
            request = self._outstanding.pop(group.group_id)
            if request is not None and (kept := await self._usable(request, group)) is not None:
                usable.append((request, kept))
        if usable:
            await asyncio.to_thread(self._commit, [group for _, group in usable])
        await self._link.acknowledge([group.group_id for group in groups])
        for request, group in usable:
            self._loop.spawn(self._score(request, group))

    async def _usable(self, request: Request, group: Group) -> Group | None:
        """The group without what cannot be trained on; None, and its prompt is asked for again, if too little is left."""
        if request.sent_at is not None:
            self._queue.note_arrival(time.monotonic() - request.sent_at, group.server_s)
        usable, reason = None, "too_few_survivors"
        try:
            usable = survivors(group, self._config.sampling, self._connection.hello.model.vocab_size)
        except ProtocolError as error:
            self._link.refuse(str(error))
            reason = "malformed"
        if usable is None:
            log.warning("group %s cannot be used: %s", group.group_id, reason)
            await self._failed(request, reason)
        return usable

    def _commit(self, groups: list[Group]) -> None:
        with self._ledger.batch():
            for group in groups:
                num_tokens = sum(len(completion.token_ids) for completion in group.completions)
                self._ledger.receive(group.group_id, pack(group), group.oldest_version, num_tokens)

    async def _score(self, request: Request, group: Group) -> None:
        slot, prompt = request.slot, request.prompt
        self._queue.scoring(slot)
        rewards = await self._scorer.score(prompt, group, self._version)
        if rewards.is_unscorable:
            self._queue.unscorable(slot, rewards)
            await self._failed(request, "unscorable")
            return
        self._scored.put(Scored(scored_group(slot, prompt, group, rewards), prompt.prompt_id, rewards))

    async def _book(self, scored: list[Scored]) -> None:
        await asyncio.to_thread(self._queue.scored, scored)
        self._wake.set()
