"""The turns of episodes: asked of the servers like groups, each under a name of its own, and handed back to the player.

    player.py ─▶ TurnRequest ─▶ Asking ─▶ … ─▶ Group of one completion ─▶ acknowledged at once ─▶ player.py

Between rollouts.py and the environments. Invariant: a turn is in no ledger: what is lost with this process is played again, under names
that no server knows.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Protocol

from learner.environments.episode import REWARDED, PlayedGroup
from learner.environments.player import Ask, Asked, Sampled
from learner.prompts.prompts import Prompt
from learner.rollouts.asking import Asking
from learner.rollouts.request import Request, TurnRequest, check_completions
from learner.servers.membership import Member
from protocol.errors import DataError, ProtocolError
from protocol.messages import Group, GroupFailed

log = logging.getLogger(__name__)


class Plays(Protocol):
    """Whoever plays the episodes of a prompt: the environments' player, or that of agents."""

    async def play(
        self, group_id: str, prompt: Prompt, ask: Ask, *, num_episodes: int, max_tokens: int
    ) -> PlayedGroup: ...


class Turns:
    """Of one run, in its event loop."""

    def __init__(self, asking: Asking, player: Plays, on_played: Callable[[PlayedGroup], None]) -> None:
        self._run, self._fleet, self._asking, self._player = asking.run, asking.fleet, asking, player
        self._on_played = on_played
        self._life = uuid.uuid4().hex[:8]
        self._num_lost = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Of all groups so far, those that were given up too."""
        return {"episode/lost": float(self._num_lost)}

    async def begin(self, requests: Iterable[Request]) -> None:
        """Play the groups of these requests."""
        for request in requests:
            self._fleet.loop.spawn(self._play(request))

    def answered(self, member: Member, message: Group | GroupFailed) -> bool:
        """Whether it was a turn's answer. Raises DataError for a turn that can never be completed."""
        turn = self._asking.get(message.group_id)
        if not isinstance(turn, TurnRequest):
            return False
        if isinstance(message, Group):
            self._fleet.loop.spawn(self._asking.acknowledge([(member, message)]))
        elif not message.retryable:
            raise DataError(f"the server at {member.endpoint} cannot complete a turn: {message.message}")
        elif message.code == "not_ready" or turn.owed_by not in (None, member.endpoint):
            return True  # it is sent again after the next push, or another server has it
        turn.answered_by = member.endpoint
        self._asking.settle(turn.group_id)
        if not turn.answer.done():  # whoever asked may have gone
            turn.answer.set_result(message)
        return True

    async def _play(self, request: Request) -> None:
        endpoints: set[str] = set()

        async def ask(asked: Asked) -> Sampled | None:
            for attempt in range(self._run.learner.max_group_attempts):
                sampled = await self._ask(request, asked, attempt)
                if sampled is not None:
                    endpoints.add(sampled.endpoint)
                    return sampled
            return None

        most = self._run.learner.environment.max_episode_tokens or self._fleet.max_model_len
        num_episodes = self._run.learner.sampling.num_completions
        played = await self._player.play(
            request.group_id, request.prompt, ask, num_episodes=num_episodes, max_tokens=most
        )
        self._num_lost += num_episodes - sum(one.course.state in REWARDED for one in played.episodes)
        request.answered_by = endpoints.pop() if len(endpoints) == 1 else ""
        self._on_played(played)

    async def _ask(self, request: Request, asked: Asked, attempt: int) -> Sampled | None:
        turn = TurnRequest(
            name=f"{request.group_id}/{self._life}/{asked.episode}.{asked.number}.{attempt}", slot=request.slot,
            attempt=request.attempt * self._run.learner.max_group_attempts + attempt, turn=asked,
            answer=asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        try:
            await self._asking.begin([turn])
            answer = await turn.answer
        except asyncio.CancelledError:
            await self._asking.withdraw(turn)
            raise
        problem = answer.message if isinstance(answer, GroupFailed) else self._problem(answer, asked)
        if isinstance(answer, Group) and problem is None:
            return Sampled(answer, turn.answered_by)
        log.warning("turn %s failed: %s", turn.group_id, problem)
        return None

    def _problem(self, group: Group, asked: Asked) -> str | None:
        """Why a turn cannot be used."""
        try:
            check_completions(group, 1, asked.max_tokens, self._fleet.hello.model.vocab_size)
        except ProtocolError as error:
            return str(error)
        return None if any(len(one.token_ids) for one in group.completions) else "it came without tokens"
