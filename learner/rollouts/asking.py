"""Who is asked for which group: every request goes to one ready server, and to another when that one may never answer.

    requests ─▶ Fleet.choose ─▶ link        lost server ─▶ the groups it owes ─▶ another, or whoever is ready next

Between what is outstanding and the links; used by rollouts.py in the loop. A turn of a session would be asked of the server that
has its keys and values: here. Invariant: a request keeps its id wherever it goes, so that an answer that comes after all, or
twice, is recognised.
"""

import asyncio
import time
from collections.abc import Iterable

from learner.config import LearnerRun
from learner.rollouts.outstanding import Outstanding
from learner.rollouts.request import Request, message_of
from learner.servers.fleet import Fleet
from learner.servers.member import Member
from protocol.messages import Group


class Asking:
    """Of one run."""

    def __init__(self, run: LearnerRun, fleet: Fleet, outstanding: Outstanding) -> None:
        self._run, self._fleet, self._outstanding = run, fleet, outstanding

    async def ask(self, requests: Iterable[Request]) -> None:
        """Ask for groups that no server owes; what cannot be sent now waits for `ask_rest`."""
        unreachable: list[Member] = []
        for request in requests:
            while self._outstanding.is_unasked(request):
                member = self._fleet.choose(unreachable)
                if member is None:
                    return
                if not await self._send(member, request):
                    unreachable.append(member)
                    self._outstanding.note_asked(request, None)

    async def ask_rest(self) -> None:
        """Ask for all that no server owes."""
        await self.ask(self._outstanding.unasked())

    async def ask_again(self, member: Member) -> None:
        """Ask a server again for all that it owes; an id that it still knows costs it nothing."""
        for request in self._outstanding.owed_by(member.endpoint):
            if not await self._send(member, request):
                return

    async def acknowledge(self, arrived: list[tuple[Member, Group]]) -> None:
        """Let each server forget the groups that came from it."""
        came = {member: [group.group_id for sender, group in arrived if sender is member] for member, _ in arrived}
        await asyncio.gather(*(member.link.acknowledge(group_ids) for member, group_ids in came.items()))

    def lost(self, member: Member) -> None:
        """What the server owes may never come from it."""
        for request in self._outstanding.owed_by(member.endpoint):
            self._outstanding.note_asked(request, None)

    async def _send(self, member: Member, request: Request) -> bool:
        config = self._run.learner
        message = message_of(request, config.sampling, self._run.seed, config.group_deadline_s)
        self._outstanding.note_asked(request, member.endpoint)
        request.sent_at = time.monotonic()
        return await member.link.generate(message)
