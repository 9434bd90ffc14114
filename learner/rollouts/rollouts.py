"""Keep the servers busy within the staleness bound, and hand out scored groups in slot order.

    task               consumes          produces                           waits for
    _admit             prompts           ledger: admitted, then Generate    the staleness rule, a synced server
    link.run           messages          groups to _on_group                the server
    Turns._play        a prompt          the turns of its episodes          servers, environments (with deadlines)
    _receive           arrived groups    ledger: received, then Ack         the commit, in a worker thread
    _score             a group           its rewards                        the reward workers, or their timeout
    _record_scores     rewards           ready groups, or dropped ones      the commit, in a worker thread
    next_batch (main)  ready groups      the batch of one step              the next groups in slot order

Invariant: groups are taken in strict slot order: the staleness bound is exact, and a resume repeats batches.
"""

import asyncio
import logging
import time

import msgspec

from learner.config import LearnerRun
from learner.environments.episode import UNKNOWN_VERSION, AnyGroup, episodes_of
from learner.rewards.scoring import Scorer
from learner.rewards.workers import GroupRewards
from learner.rollouts.bottleneck import DESCRIPTIONS
from learner.rollouts.dispatcher import Dispatcher
from learner.rollouts.group_requests import GroupRequest, check_routed_experts, survivors
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger_storage import CommitQueue
from learner.rollouts.reference_scores import ReferenceScores
from learner.rollouts.rollout_buffer import RolloutBuffer, ScoredGroup
from learner.rollouts.rollout_group import RolloutGroup, keep, scored_group
from learner.rollouts.turns import EpisodePlayer, Turns
from learner.servers.fleet import Fleet
from learner.servers.membership import Member
from protocol.console import counted
from protocol.errors import DataError, ProtocolError
from protocol.messages import Group, GroupFailed

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
CHECK_INTERVAL_S = 0.2
"""Longest time until a failure in the background ends the main thread's wait, in seconds."""


class Rollouts:
    """Rollout tasks of one run, in the fleet's event loop.

    The main thread calls `start`, `publish`, `next_batch` and `close`. State shared by both threads is in
    rollout_buffer.py. Slot order also keeps long completions from being overtaken.
    """

    def __init__(
        self, run: LearnerRun, fleet: Fleet, buffer: RolloutBuffer, scorer: Scorer, ledger: Ledger,
        reference: ReferenceScores | None = None,
    ) -> None:  # fmt: skip
        self._config = run.learner
        self._fleet, self._loop = fleet, fleet.loop
        self._buffer, self._scorer, self._ledger = buffer, scorer, ledger
        self._reference = reference
        self._popped: list[RolloutGroup] | None = None
        """Groups of the next step that wait for the logprobs of the reference's server."""
        self._dispatcher = Dispatcher(run, fleet)
        self._turns: Turns | None = None
        self._version = 0
        self._wake = asyncio.Event()
        self._arrived = CommitQueue(self._receive)
        self._scored = CommitQueue(self._record_scores)

    # --- called in the main thread --------------------------------------------------------------------------

    def start(self, version: int, player: EpisodePlayer | None = None) -> None:
        """Restore all groups from the ledger, connect to the servers and start the tasks.

        With a `player`, groups are played as episodes.
        """
        self._version = version
        if player is not None:
            self._turns = Turns(self._dispatcher, player, lambda group: self._arrived.put((None, group)))
        for request, group in self._buffer.restore(version):
            self._loop.spawn(self._score(request, group))
        self._fleet.start(self._on_group, self._on_welcome, self._on_lost, self._dispatcher.num_pending)
        for work in (self._admit(), self._arrived.run(), self._scored.run(), self._dispatcher.resend_lost()):
            self._loop.spawn(work)

    def publish(self, version: int, *server_ids: str) -> None:
        """Admit new groups, as these servers now generate with `version`."""
        self._loop.call_soon(self._published, version, server_ids)

    def next_batch(self, version: int, timeout_s: float) -> list[RolloutGroup] | None:
        """Return the next step's groups in slot order, or None after `timeout_s`.

        `version` is the learner's, from which staleness is counted. Servers may have an older one during a
        weight sync.

        Raises:
            RewardError: A reward function failed.
            DataError: No prompt is left, or a server cannot complete one.
            DeadlineExceeded: The reference's server did not score in time.
            HandshakeRefused: The last server does not fit this run.
            LedgerError: The ledger cannot be read or written.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._loop.raise_failure()
            remaining_s = max(0.0, deadline - time.monotonic())
            groups = self._next_groups(version, min(CHECK_INTERVAL_S, remaining_s))
            if groups is not None or remaining_s == 0:
                return groups

    def _next_groups(self, version: int, timeout_s: float) -> list[RolloutGroup] | None:
        if self._popped is None:
            self._popped = self._buffer.pop_batch(
                version, timeout_s, is_connected=self._fleet.is_generating, published=self._version,
                on_stale=lambda retry: self._loop.spawn(self._begin_retry(retry)),
            )  # fmt: skip
        if (groups := self._popped) is not None and self._reference is not None:
            groups = self._reference.take(groups, self._buffer.scored, timeout_s)
        self._popped = self._popped if groups is None else None
        return groups

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the last batch, of resent requests and of lost episodes."""
        turn_metrics = self._turns.metrics if self._turns is not None else {}
        reference_metrics = self._reference.pop_metrics() if self._reference is not None else {}
        return self._buffer.batch_metrics | self._dispatcher.metrics | turn_metrics | reference_metrics

    @property
    def waits_for(self) -> str:
        """Description of what the next batch waits for."""
        if self._popped is not None and self._reference is not None:
            num_groups, endpoint = self._reference.num_pending, self._reference.server.endpoint
            return f"{counted(num_groups, 'group')} to be scored by the reference's server at {endpoint}"
        match self._buffer.waits_for(is_connected=self._fleet.is_generating):
            case "link":
                return self._fleet.describe()
            case "server":
                return f"{counted(self._buffer.num('admitted', 'requested'), 'group')} from the server"
            case "reward":
                return f"{counted(self._buffer.num('received'), 'group')} to be scored"
            case part:
                return DESCRIPTIONS[part]

    def close(self) -> None:
        """Cancel all requests at the servers; the ledger keeps them for a resume."""
        for member in self._fleet.connected():
            self._loop.end(member.link.cancel(self._dispatcher.group_ids), CALL_TIMEOUT_S)
        self._loop.call_soon(self._dispatcher.forget_all)

    # --- called in the loop thread --------------------------------------------------------------------------

    def _on_welcome(self, member: Member) -> None:
        self._record_capacity()
        if self._fleet.is_ready(member):
            self._loop.spawn(self._dispatcher.resend_all(member))
            self._loop.spawn(self._dispatcher.send_unassigned())

    def _on_lost(self, member: Member) -> None:
        self._record_capacity()
        self._dispatcher.unassign_all(member)
        self._loop.spawn(self._dispatcher.send_unassigned())

    def _published(self, version: int, server_ids: tuple[str, ...]) -> None:
        # Together, or groups admitted under this version would go to servers that have only the one before.
        self._version = version
        self._fleet.published(version, server_ids)
        self._record_capacity()
        self._loop.spawn(self._dispatcher.send_unassigned())
        self._wake.set()

    def _record_capacity(self) -> None:
        if num_sequences := self._fleet.max_concurrent_sequences:
            self._buffer.record_capacity(num_sequences)

    async def _admit(self) -> None:
        """Admit prompts when the staleness rule has room, after the first weight sync.

        A new version or a skipped slot makes room.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._fleet.version is not None:
                await self._begin(self._buffer.admit(self._version))

    async def _begin(self, requests: list[GroupRequest]) -> None:
        await (self._dispatcher.begin(requests) if self._turns is None else self._turns.begin(requests))

    def _on_group(self, member: Member, message: Group | GroupFailed) -> None:
        if isinstance(message, GroupFailed) and message.code == "draining":
            self._loop.spawn(self._dispatcher.reassign(member, message.group_id))
            return
        if self._turns is not None and self._turns.answered(member, message):
            return
        request = self._buffer.pending(message.group_id)
        if isinstance(message, Group):
            is_kept = request is not None and request.assigned_to != member.endpoint
            if is_kept or message.entered_version > self._version:  # from before a restart, with other weights
                message = msgspec.structs.replace(message, entered_version=UNKNOWN_VERSION)
            self._arrived.put((member, message))
            return
        match message:
            case GroupFailed(retryable=False) if request is not None:
                raise DataError(
                    f"the server at {member.endpoint} cannot complete prompt {request.prompt.prompt_id}: "
                    f"{message.message}"
                )
            case GroupFailed(code="not_ready"):
                pass  # resent after the next weight sync
            case GroupFailed() if request is not None and request.assigned_to in (None, member.endpoint):
                log.warning("group %s failed (%s): %s", message.group_id, message.code, message.message)
                self._dispatcher.forget(request.group_id)
                self._retry(request, message.code)

    def _retry(self, request: GroupRequest, reason: str, rewards: GroupRewards | None = None) -> None:
        retry = self._buffer.retry(request.group_id, reason, self._version, rewards=rewards)
        self._loop.spawn(self._begin_retry(retry))

    async def _begin_retry(self, retry: GroupRequest | None) -> None:
        """Send a retry; without one, the slot is passed over, which makes room for another."""
        if retry is not None:
            await self._begin([retry])
        else:
            self._wake.set()

    async def _receive(self, arrived: list[tuple[Member | None, AnyGroup]]) -> None:
        """Commit groups, acknowledge them to their servers, then score them.

        A duplicate is only acknowledged.
        """
        usable: list[tuple[GroupRequest, AnyGroup]] = []
        for member, group in arrived:
            self._dispatcher.forget(group.group_id)
            request = self._buffer.receive(group.group_id)
            if request is not None and (kept := self._usable(request, member, group)) is not None:
                usable.append((request, kept))
        if usable:
            await asyncio.to_thread(keep, self._ledger, [group for _, group in usable])
        await self._dispatcher.acknowledge((member, group) for member, group in arrived if member is not None)
        for request, group in usable:
            self._loop.spawn(self._score(request, group))

    def _usable(self, request: GroupRequest, member: Member | None, group: AnyGroup) -> AnyGroup | None:
        """Return the trainable part of a group.

        Returns None if too little is left, and requests the prompt again.
        """
        if member is not None and isinstance(group, Group):
            request.answered_by = member.endpoint
            if request.sent_at is not None:
                self._buffer.record_arrival(time.monotonic() - request.sent_at, group.server_s)
        usable, reason = None, "too_few_survivors"
        try:
            if self._fleet.experts is not None and isinstance(group, Group):
                check_routed_experts(group, len(request.prompt.token_ids), self._fleet.experts)
            usable = survivors(group, self._config.sampling, self._fleet.hello.model.vocab_size)
        except ProtocolError as error:
            if member is not None:
                member.link.refuse(str(error))
            reason = "malformed"
        if usable is None:
            log.warning("discarded group %s (%s)", group.group_id, reason)
            self._retry(request, reason)
        return usable

    async def _score(self, request: GroupRequest, group: AnyGroup) -> None:
        slot, prompt = request.slot, request.prompt
        rewards = await self._scorer.score(prompt, episodes_of(group), self._version)
        if rewards.is_unscorable and self._config.reward.is_learned_from:
            self._retry(request, "unscorable", rewards)
            return
        ready = scored_group(slot, prompt, group, rewards, request.answered_by)
        self._scored.put(ScoredGroup(ready, prompt.prompt_id, rewards))

    async def _record_scores(self, scored: list[ScoredGroup]) -> None:
        await asyncio.to_thread(self._buffer.record_scores, scored)
        if self._reference is not None:
            self._reference.begin(self._buffer.scored())
        self._wake.set()
