"""Dispatch requests for groups and turns to ready servers, and resend requests that were lost.

    requests ─▶ Fleet.choose ─▶ link        server lost  ─▶ its pending requests ─▶ the next ready server
                                            request lost ─▶ the same server, after learner.group_deadline_s

Used by rollouts.py in the event loop, between the pending groups and the links.
Invariant: a request keeps its id when it moves to another server, so late and duplicate answers are
recognized. It stays here until it is settled or withdrawn.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable

from learner.config import LearnerRun
from learner.environments.episode import AnyGroup
from learner.rollouts.group_requests import PendingRequest
from learner.servers.fleet import Fleet
from learner.servers.membership import Member

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
UNDER_WAY_S = 5.0
"""Age below which a sent request may be missing from a server's group count, in seconds."""


class Dispatcher:
    """Dispatcher of all pending requests of one run."""

    def __init__(self, run: LearnerRun, fleet: Fleet) -> None:
        self.run, self.fleet = run, fleet
        self._owed: dict[str, PendingRequest] = {}
        self.num_owed: Counter[str] = Counter()
        """Number of pending requests by endpoint."""
        self._num_resent = 0

    @property
    def metrics(self) -> dict[str, float]:
        return {"rollout/resent_requests": float(self._num_resent)}

    @property
    def group_ids(self) -> list[str]:
        return list(self._owed)

    def get(self, group_id: str) -> PendingRequest | None:
        return self._owed.get(group_id)

    def settle(self, group_id: str) -> PendingRequest | None:
        """Remove and return the request with this id, or None if it is not pending."""
        owed = self._owed.get(group_id)
        if owed is not None:
            self._note_asked(owed, None)
            del self._owed[group_id]
        return owed

    def forget_all(self) -> None:
        """Forget all pending requests, so that later answers are ignored."""
        for group_id in self.group_ids:
            self.settle(group_id)

    async def withdraw(self, owed: PendingRequest) -> None:
        """Forget a request and cancel it at its server."""
        endpoint = owed.owed_by
        if self.settle(owed.group_id) is None:
            return
        for member in self.fleet.connected():
            if member.endpoint == endpoint:
                await member.link.cancel([owed.group_id])

    async def begin(self, requests: Iterable[PendingRequest]) -> None:
        """Register and send requests; those that cannot be sent now wait for `ask_rest`."""
        requests = list(requests)
        self._owed |= {request.group_id: request for request in requests}
        await self._ask(requests)

    async def ask_rest(self) -> None:
        """Send all requests that no server has."""
        await self._ask([owed for owed in self._owed.values() if owed.owed_by is None])

    async def ask_again(self, member: Member) -> None:
        """Resend a server all its pending requests; ids it still has cost nothing."""
        for owed in self._owed_by(member):
            if not await self._send(member, owed):
                return

    async def resend_lost(self) -> None:
        """Resend overdue requests to servers that hold fewer groups than are pending.

        The server's count distinguishes a lost request from a paused server and from a long completion.
        Resending an id that the server still has costs nothing. Runs until canceled.
        """
        deadline_s = self.run.learner.group_deadline_s
        while True:
            await asyncio.sleep(min(CHECK_INTERVAL_S, deadline_s / 4))
            for member in self.fleet.connected():
                await self._resend_lost(member, deadline_s)

    async def _resend_lost(self, member: Member, deadline_s: float) -> None:
        num_held, counted_at = member.link.last_count
        pending = [(owed.sent_at, owed) for owed in self._owed_by(member) if owed.sent_at is not None]
        overdue = [owed for sent_at, owed in pending if time.monotonic() - sent_at > deadline_s]
        has_had_since = counted_at - min(UNDER_WAY_S, deadline_s / 4)
        if not overdue or num_held >= sum(sent_at < has_had_since for sent_at, _ in pending):
            return
        log.warning(
            "resending %d requests to the server at %s, such as %s (no answer for %g s, learner.group_deadline_s; "
            "the server has %d of %d groups)",
            len(overdue), member.endpoint, overdue[0].group_id, deadline_s, num_held, len(pending),
        )  # fmt: skip
        for owed in overdue:
            if self._owed.get(owed.group_id) is owed and owed.owed_by == member.endpoint:
                self._num_resent += 1
                if not await self._send(member, owed):
                    return

    async def acknowledge(self, arrived: Iterable[tuple[Member, AnyGroup]]) -> None:
        """Let each server forget the groups that arrived from it."""
        came: dict[Member, list[str]] = {}
        for member, group in arrived:
            came.setdefault(member, []).append(group.group_id)
        await asyncio.gather(*(member.link.acknowledge(group_ids) for member, group_ids in came.items()))

    def lost(self, member: Member) -> None:
        """Unassign the pending requests of a lost server."""
        for owed in self._owed_by(member):
            self._note_asked(owed, None)

    async def handed_back(self, member: Member, group_id: str) -> None:
        """Reassign a request that a draining server has not started.

        The request does not count as a failed attempt.
        """
        owed = self._owed.get(group_id)
        if owed is not None and owed.owed_by == member.endpoint:
            self._note_asked(owed, None)
            await self._ask([owed])

    async def _ask(self, requests: Iterable[PendingRequest]) -> None:
        unreachable: list[Member] = []
        for owed in requests:
            # During `_send` another task may send this request, or its previous server may answer.
            while owed.owed_by is None and self._owed.get(owed.group_id) is owed:
                member = self.fleet.choose(unreachable, owed.stays_at)
                if member is None:
                    return
                if not await self._send(member, owed):
                    unreachable.append(member)
                    self._note_asked(owed, None)

    async def _send(self, member: Member, owed: PendingRequest) -> bool:
        self._note_asked(owed, member.endpoint)
        owed.sent_at = time.monotonic()
        return await member.link.generate(owed.message(self.run))

    def _owed_by(self, member: Member) -> list[PendingRequest]:
        return [owed for owed in self._owed.values() if owed.owed_by == member.endpoint]

    def _note_asked(self, owed: PendingRequest, endpoint: str | None) -> None:
        """Record which server has the request; None for no server."""
        if self._owed.get(owed.group_id) is not owed:
            return
        if owed.owed_by is not None:
            self.num_owed[owed.owed_by] -= 1
        owed.owed_by = endpoint
        if endpoint is not None:
            self.num_owed[endpoint] += 1
