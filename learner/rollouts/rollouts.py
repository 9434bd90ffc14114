"""Rollouts: keeps the servers busy within the staleness bound and hands out scored groups in slot order.

    loop           consumes              produces                        waits for                    unblocked by
    _admit         prompts, as the       ledger: admitted, Generate      room under the admission     publish (a new version),
                   queue has them                                        rule, a server with weights  a slot passed over
    link.run       messages              groups to _on_group             the server                   the server
    Turns._play    a prompt              the turns of its episodes       servers, environments        deadlines of both
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

from learner.config import LearnerRun
from learner.environments.episode import AnyGroup, episodes_of
from learner.rewards.scoring import Scorer
from learner.rollouts.asking import Asking
from learner.rollouts.ledger import Ledger
from learner.rollouts.outstanding import Outstanding
from learner.rollouts.queue import GroupQueue, Scored
from learner.rollouts.request import Request, survivors
from learner.rollouts.scored_group import ScoredGroup, keep, recalled, received, scored_group
from learner.rollouts.turns import Plays, Turns
from learner.rollouts.waits import IN_WORDS
from learner.servers.fleet import Fleet
from learner.servers.membership import Member
from learner.together import Together
from protocol.errors import DataError, ProtocolError
from protocol.messages import Group, GroupFailed

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.2
"""How soon a failure in the background ends the main thread's wait."""


class Rollouts:
    """Runs in the fleet's loop; `take` and `publish` are the main thread's side."""

    def __init__(
        self, run: LearnerRun, fleet: Fleet, queue: GroupQueue, outstanding: Outstanding, scorer: Scorer, ledger: Ledger
    ) -> None:
        self._config = run.learner
        self._fleet, self._loop = fleet, fleet.loop
        self._queue, self._outstanding, self._scorer, self._ledger = queue, outstanding, scorer, ledger
        self._asking = Asking(run, fleet)
        self._turns: Turns | None = None
        self._version = 0
        self._wake = asyncio.Event()
        self._arrived = Together(self._receive)
        self._scored = Together(self._book)

    # --- the main thread's side ----------------------------------------------------------------------------------

    def start(self, version: int, player: Plays | None = None) -> None:
        """Take up every group where the ledger has it (a new run has none) and greet the servers. A player plays the groups."""
        self._version = version
        if player is not None:
            self._turns = Turns(self._asking, player, lambda group: self._arrived.put((None, group)))
        self._take_up()
        self._fleet.start(self._on_group, self._on_welcome, self._on_lost, self._asking.num_owed)
        for work in (self._admit(), self._arrived.run(), self._scored.run(), self._asking.resend_lost()):
            self._loop.spawn(work)

    def publish(self, version: int, *server_ids: str) -> None:
        """These servers now generate with `version`: admit what the rule allows."""
        self._version = version
        self._loop.call_soon(self._published, version, server_ids)

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
                is_connected=self._fleet.is_connected, on_stale=lambda group: self._too_old(group, version),
            )  # fmt: skip
            if groups is not None or remaining_s <= 0:
                return groups

    @property
    def batch_metrics(self) -> dict[str, float]:
        """What happened on the way to the batch that was taken last, and what it waited for."""
        of_turns = self._turns.metrics if self._turns is not None else {}
        return self._queue.batch_metrics | self._asking.metrics | of_turns

    @property
    def waits_for(self) -> str:
        """In words, what the next batch waits for."""
        part, num_scoring = self._queue.lacks(is_connected=self._fleet.is_connected)
        in_words = {"link": self._fleet.in_words(), "server": f"{len(self._outstanding)} groups from the server"}
        return {"reward": f"{num_scoring} groups to be scored", "push": IN_WORDS["push"], **in_words}[part]

    def close(self) -> None:
        """Let the servers forget what was asked for; the ledger remembers it for a resume."""
        for member in self._fleet.connected():
            self._loop.call(member.link.cancel(self._asking.group_ids), CALL_TIMEOUT_S)
        self._loop.call_soon(self._asking.forget_all)

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

    def _on_welcome(self, member: Member) -> None:
        self._note_capacity()
        if self._fleet.is_ready(member):
            self._loop.spawn(self._asking.ask_again(member))
            self._loop.spawn(self._asking.ask_rest())

    def _on_lost(self, member: Member) -> None:
        self._note_capacity()
        self._asking.lost(member)
        self._loop.spawn(self._asking.ask_rest())

    def _published(self, version: int, server_ids: tuple[str, ...]) -> None:
        self._fleet.published(version, server_ids)
        self._note_capacity()
        self._loop.spawn(self._asking.ask_rest())
        self._wake.set()

    def _note_capacity(self) -> None:
        if num_sequences := self._fleet.max_concurrent_sequences:
            self._queue.note_capacity(num_sequences)

    async def _admit(self) -> None:
        """Ask for prompts whenever the rule has room, once this run has been published."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._fleet.version is not None:
                await self._begin(self._queue.admit(self._outstanding, self._version))

    async def _begin(self, requests: list[Request]) -> None:
        await (self._asking.begin(requests) if self._turns is None else self._turns.begin(requests))

    def _on_group(self, member: Member, message: Group | GroupFailed) -> None:
        if isinstance(message, GroupFailed) and message.code == "draining":
            self._loop.spawn(self._asking.handed_back(member, message.group_id))
            return
        if self._turns is not None and self._turns.answered(member, message):
            return
        if isinstance(message, Group):
            self._arrived.put((member, message))
            return
        request = self._outstanding.get(message.group_id)
        match message:
            case GroupFailed(retryable=False) if request is not None:
                raise DataError(
                    f"the server at {member.endpoint} cannot complete prompt {request.prompt.prompt_id}: {message.message}"
                )
            case GroupFailed(code="not_ready"):
                pass  # it is sent again after the next push
            case GroupFailed() if request is not None and request.owed_by in (None, member.endpoint):
                log.warning("group %s failed (%s): %s", message.group_id, message.code, message.message)
                self._outstanding.pop(request.group_id)
                self._asking.settle(request.group_id)
                self._loop.spawn(self._failed(request, message.code))

    async def _failed(self, request: Request, reason: str) -> None:
        self._outstanding.count_failure(request.slot)
        await self._ask_again(request.group_id, request.slot, reason)

    async def _ask_again(self, group_id: str, slot: int, reason: str) -> None:
        """Drop a group and ask for its prompt under the next attempt, or give the slot up."""
        request = self._outstanding.ask_again(group_id, slot, reason, self._version)
        if request is not None:
            await self._begin([request])
            return
        self._queue.fail(slot)
        self._wake.set()

    async def _receive(self, arrived: list[tuple[Member | None, AnyGroup]]) -> None:
        """Commit groups, then acknowledge them to whom they came from, then score them. A duplicate is only acknowledged."""
        usable: list[tuple[Request, AnyGroup]] = []
        for member, group in arrived:
            self._asking.settle(group.group_id)
            request = self._outstanding.pop(group.group_id)
            if request is not None and (kept := await self._usable(request, member, group)) is not None:
                usable.append((request, kept))
        if usable:
            await asyncio.to_thread(keep, self._ledger, [group for _, group in usable])
        await self._asking.acknowledge((member, group) for member, group in arrived if member is not None)
        for request, group in usable:
            self._loop.spawn(self._score(request, group))

    async def _usable(self, request: Request, member: Member | None, group: AnyGroup) -> AnyGroup | None:
        """The group without what cannot be trained on; None, and its prompt is asked for again, if too little is left."""
        if member is not None and isinstance(group, Group):
            request.answered_by = member.endpoint
            if request.sent_at is not None:
                self._queue.note_arrival(time.monotonic() - request.sent_at, group.server_s)
        usable, reason = None, "too_few_survivors"
        try:
            usable = survivors(group, self._config.sampling, self._fleet.hello.model.vocab_size)
        except ProtocolError as error:
            if member is not None:
                member.link.refuse(str(error))
            reason = "malformed"
        if usable is None:
            log.warning("group %s cannot be used: %s", group.group_id, reason)
            await self._failed(request, reason)
        return usable

    async def _score(self, request: Request, group: AnyGroup) -> None:
        slot, prompt = request.slot, request.prompt
        self._queue.scoring(slot)
        rewards = await self._scorer.score(prompt, episodes_of(group), self._version)
        if rewards.is_unscorable:
            self._queue.unscorable(slot, rewards)
            await self._failed(request, "unscorable")
            return
        ready = scored_group(slot, prompt, group, rewards, request.answered_by)
        self._scored.put(Scored(ready, prompt.prompt_id, rewards))

    async def _book(self, scored: list[Scored]) -> None:
        await asyncio.to_thread(self._queue.scored, scored)
        self._wake.set()
