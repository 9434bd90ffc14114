"""Who is asked for what: every request goes to one ready server, and to another when that one may never answer.

    requests ─▶ Fleet.choose ─▶ link        lost server ─▶ what it owes ─▶ another, or whoever is ready next
                                            lost request ─▶ the same server, after learner.group_deadline_s

Between what is outstanding and the links; used by rollouts.py in the loop. Invariant: a request keeps its id wherever it goes, so that an
answer that comes after all, or twice, is recognised; it stays here until `settle`, or until nobody waits for it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable

from learner.config import LearnerRun
from learner.environments.episode import AnyGroup
from learner.rollouts.request import Owed
from learner.servers.fleet import Fleet
from learner.servers.membership import Member

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
UNDER_WAY_S = 5.0
"""A request that was sent less than this before the server counted its groups may have missed the count."""


class Asking:
    """Of one run: what servers owe, or are to."""

    def __init__(self, run: LearnerRun, fleet: Fleet) -> None:
        self.run, self.fleet = run, fleet
        self._owed: dict[str, Owed] = {}
        self.num_owed: Counter[str] = Counter()
        """By endpoint."""
        self._num_resent = 0

    @property
    def metrics(self) -> dict[str, float]:
        return {"rollout/resent_requests": float(self._num_resent)}

    @property
    def group_ids(self) -> list[str]:
        return list(self._owed)

    def get(self, group_id: str) -> Owed | None:
        return self._owed.get(group_id)

    def settle(self, group_id: str) -> Owed | None:
        """Take the request that an answer is for; None: nothing was asked, or it has been answered."""
        owed = self._owed.get(group_id)
        if owed is not None:
            self._note_asked(owed, None)
            del self._owed[group_id]
        return owed

    def forget_all(self) -> None:
        """The run ends: whatever comes is an answer to nothing."""
        for group_id in self.group_ids:
            self.settle(group_id)

    async def withdraw(self, owed: Owed) -> None:
        """Nobody waits for it any longer; whoever owes it is told."""
        endpoint = owed.owed_by
        if self.settle(owed.group_id) is None:
            return
        for member in self.fleet.connected():
            if member.endpoint == endpoint:
                await member.link.cancel([owed.group_id])

    async def begin(self, requests: Iterable[Owed]) -> None:
        """Ask for what no server owes yet; what cannot be sent now waits for `ask_rest`."""
        requests = list(requests)
        self._owed |= {request.group_id: request for request in requests}
        await self._ask(requests)

    async def ask_rest(self) -> None:
        """Ask for all that no server owes."""
        await self._ask([owed for owed in self._owed.values() if owed.owed_by is None])

    async def ask_again(self, member: Member) -> None:
        """Ask a server again for all that it owes; an id that it still knows costs it nothing."""
        for owed in self._owed_by(member):
            if not await self._send(member, owed):
                return

    async def resend_lost(self) -> None:
        """Send overdue requests again to a server that counts fewer groups than are pending there. Run until cancelled.

        The count tells a lost request from a paused server and from a long completion. An id that the server still has
        costs it nothing.
        """
        deadline_s = self.run.learner.group_deadline_s
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, deadline_s / 4))
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
            "it has %d of %d)",
            len(overdue), member.endpoint, overdue[0].group_id, deadline_s, num_held, len(pending),
        )  # fmt: skip
        for owed in overdue:
            if self._owed.get(owed.group_id) is owed and owed.owed_by == member.endpoint:
                self._num_resent += 1
                if not await self._send(member, owed):
                    return

    async def acknowledge(self, arrived: Iterable[tuple[Member, AnyGroup]]) -> None:
        """Let each server forget the groups that came from it."""
        came: dict[Member, list[str]] = {}
        for member, group in arrived:
            came.setdefault(member, []).append(group.group_id)
        await asyncio.gather(*(member.link.acknowledge(group_ids) for member, group_ids in came.items()))

    def lost(self, member: Member) -> None:
        """What the server owes may never come from it."""
        for owed in self._owed_by(member):
            self._note_asked(owed, None)

    async def handed_back(self, member: Member, group_id: str) -> None:
        """Ask another for what this server has not begun and will not: that has cost no attempt."""
        owed = self._owed.get(group_id)
        if owed is not None and owed.owed_by == member.endpoint:
            self._note_asked(owed, None)
            await self._ask([owed])

    async def _ask(self, requests: Iterable[Owed]) -> None:
        unreachable: list[Member] = []
        for owed in requests:
            # Meanwhile it may have been sent, or its answer may have come from whom it was asked of before.
            while owed.owed_by is None and self._owed.get(owed.group_id) is owed:
                member = self.fleet.choose(unreachable, owed.stays_at)
                if member is None:
                    return
                if not await self._send(member, owed):
                    unreachable.append(member)
                    self._note_asked(owed, None)

    async def _send(self, member: Member, owed: Owed) -> bool:
        self._note_asked(owed, member.endpoint)
        owed.sent_at = time.monotonic()
        return await member.link.generate(owed.message(self.run))

    def _owed_by(self, member: Member) -> list[Owed]:
        return [owed for owed in self._owed.values() if owed.owed_by == member.endpoint]

    def _note_asked(self, owed: Owed, endpoint: str | None) -> None:
        """It is asked of this server; None: of none any more."""
        if self._owed.get(owed.group_id) is not owed:
            return
        if owed.owed_by is not None:
            self.num_owed[owed.owed_by] -= 1
        owed.owed_by = endpoint
        if endpoint is not None:
            self.num_owed[endpoint] += 1
