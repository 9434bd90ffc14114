"""Dispatch requests for groups and turns to ready servers, and resend requests that were lost.

    requests ─▶ Fleet.choose ─▶ link        server lost  ─▶ its pending requests ─▶ the next ready server
                                            request lost ─▶ the same server, after learner.group_idle_timeout_s

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
        self._pending: dict[str, PendingRequest] = {}
        self.num_pending: Counter[str] = Counter()
        """Number of pending requests by endpoint."""
        self._num_resent = 0

    @property
    def metrics(self) -> dict[str, float]:
        return {"rollout/resent_requests": float(self._num_resent)}

    @property
    def group_ids(self) -> list[str]:
        return list(self._pending)

    def get(self, group_id: str) -> PendingRequest | None:
        return self._pending.get(group_id)

    def forget(self, group_id: str) -> PendingRequest | None:
        """Remove and return the request with this id, or None if it is not pending."""
        request = self._pending.get(group_id)
        if request is not None:
            self._assign(request, None)
            del self._pending[group_id]
        return request

    def forget_all(self) -> None:
        """Forget all pending requests, so that later answers are ignored."""
        for group_id in self.group_ids:
            self.forget(group_id)

    async def withdraw(self, request: PendingRequest) -> None:
        """Forget a request and cancel it at its server."""
        endpoint = request.assigned_to
        if self.forget(request.group_id) is None:
            return
        for member in self.fleet.connected():
            if member.endpoint == endpoint:
                await member.link.cancel([request.group_id])

    async def begin(self, requests: Iterable[PendingRequest]) -> None:
        """Register and send requests; those that cannot be sent now wait for `send_unassigned`."""
        requests = list(requests)
        self._pending |= {request.group_id: request for request in requests}
        await self._dispatch(requests)

    async def send_unassigned(self) -> None:
        """Send all requests that no server has."""
        await self._dispatch([request for request in self._pending.values() if request.assigned_to is None])

    async def resend_all(self, member: Member) -> None:
        """Resend a server all its pending requests; ids it still has cost nothing."""
        for request in self._pending_at(member):
            if not await self._send(member, request):
                return

    async def resend_lost(self) -> None:
        """Resend overdue requests to servers that hold fewer groups than are pending.

        The server's count distinguishes a lost request from a paused server and from a long completion.
        Resending an id that the server still has costs nothing. Runs until canceled.
        """
        deadline_s = self.run.learner.group_idle_timeout_s
        while True:
            await asyncio.sleep(min(CHECK_INTERVAL_S, deadline_s / 4))
            for member in self.fleet.connected():
                await self._resend_lost(member, deadline_s)

    async def _resend_lost(self, member: Member, deadline_s: float) -> None:
        num_held, counted_at = member.link.last_count
        pending = [(request.sent_at, request) for request in self._pending_at(member) if request.sent_at is not None]
        overdue = [request for sent_at, request in pending if time.monotonic() - sent_at > deadline_s]
        has_had_since = counted_at - min(UNDER_WAY_S, deadline_s / 4)
        if not overdue or num_held >= sum(sent_at < has_had_since for sent_at, _ in pending):
            return
        log.warning(
            "resending %d requests to the server at %s, such as %s (no answer for %g s, learner.group_idle_timeout_s; "
            "the server has %d of %d groups)",
            len(overdue), member.endpoint, overdue[0].group_id, deadline_s, num_held, len(pending),
        )  # fmt: skip
        for request in overdue:
            if self._pending.get(request.group_id) is request and request.assigned_to == member.endpoint:
                self._num_resent += 1
                if not await self._send(member, request):
                    return

    async def acknowledge(self, arrived: Iterable[tuple[Member, AnyGroup]]) -> None:
        """Let each server forget the groups that arrived from it."""
        ids_by_member: dict[Member, list[str]] = {}
        for member, group in arrived:
            ids_by_member.setdefault(member, []).append(group.group_id)
        await asyncio.gather(*(member.link.acknowledge(group_ids) for member, group_ids in ids_by_member.items()))

    def unassign_all(self, member: Member) -> None:
        """Unassign the pending requests of a lost server."""
        for request in self._pending_at(member):
            self._assign(request, None)

    async def reassign(self, member: Member, group_id: str) -> None:
        """Reassign a request that a draining server has not started.

        The request does not count as a failed attempt.
        """
        request = self._pending.get(group_id)
        if request is not None and request.assigned_to == member.endpoint:
            self._assign(request, None)
            await self._dispatch([request])

    async def _dispatch(self, requests: Iterable[PendingRequest]) -> None:
        unreachable: list[Member] = []
        for request in requests:
            # During `_send` another task may send this request, or its previous server may answer.
            while request.assigned_to is None and self._pending.get(request.group_id) is request:
                member = self.fleet.choose(unreachable, request.stays_at)
                if member is None:
                    return
                if not await self._send(member, request):
                    unreachable.append(member)
                    self._assign(request, None)

    async def _send(self, member: Member, request: PendingRequest) -> bool:
        self._assign(request, member.endpoint)
        request.sent_at = time.monotonic()
        return await member.link.generate(request.message(self.run))

    def _pending_at(self, member: Member) -> list[PendingRequest]:
        return [request for request in self._pending.values() if request.assigned_to == member.endpoint]

    def _assign(self, request: PendingRequest, endpoint: str | None) -> None:
        """Record which server has the request; None for no server."""
        if self._pending.get(request.group_id) is not request:
            return
        if request.assigned_to is not None:
            self.num_pending[request.assigned_to] -= 1
        request.assigned_to = endpoint
        if endpoint is not None:
            self.num_pending[endpoint] += 1
