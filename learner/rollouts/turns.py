"""Dispatch the turns of episodes to the servers like groups, and return the answers to the player.

    player.py ─▶ TurnRequest ─▶ Dispatcher ─▶ … ─▶ Group of one completion ─▶ acknowledged ─▶ player.py

Used between rollouts.py and the environments.
Invariant: turns are not in the ledger. Episodes lost in a restart are played again, with ids that no server
knows.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Protocol

from learner.environments.episode import REWARDED, EpisodeGroup
from learner.environments.player import Ask, TurnPrompt, TurnResult
from learner.prompts.prompts import Prompt
from learner.rollouts.dispatcher import Dispatcher
from learner.rollouts.group_requests import GroupRequest, TurnRequest, check_completions, check_routed_experts
from learner.servers.membership import Member
from protocol.errors import DataError, ProtocolError
from protocol.messages import Group, GroupFailed

log = logging.getLogger(__name__)


class EpisodePlayer(Protocol):
    """Player of a prompt's episodes: environments or agents."""

    async def play(
        self, group_id: str, prompt: Prompt, ask: Ask, *, num_episodes: int, max_tokens: int
    ) -> EpisodeGroup: ...


class Turns:
    """Dispatcher of one run's turns, used in its event loop."""

    def __init__(
        self, dispatcher: Dispatcher, player: EpisodePlayer, on_played: Callable[[EpisodeGroup], None]
    ) -> None:
        self._run, self._fleet, self._dispatcher, self._player = dispatcher.run, dispatcher.fleet, dispatcher, player
        self._on_played = on_played
        self._life = uuid.uuid4().hex[:8]
        self._num_lost = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of all groups so far, including those that were given up."""
        return {"episode/lost": float(self._num_lost)}

    async def begin(self, requests: Iterable[GroupRequest]) -> None:
        """Start to play the groups of these requests."""
        for request in requests:
            self._fleet.loop.spawn(self._play(request))

    def answered(self, member: Member, message: Group | GroupFailed) -> bool:
        """Handle the answer to a turn; return False for any other message.

        Raises:
            DataError: The turn can never be completed.
        """
        turn = self._dispatcher.get(message.group_id)
        if not isinstance(turn, TurnRequest):
            return False
        if isinstance(message, Group):
            self._fleet.loop.spawn(self._dispatcher.acknowledge([(member, message)]))
        elif not message.retryable and self._fits(turn.turn):
            raise DataError(f"the server at {member.endpoint} cannot complete a turn: {message.message}")
        elif message.code == "not_ready" or turn.assigned_to not in (None, member.endpoint):
            return True  # resent after the next weight sync, or pending at another server
        turn.answered_by = member.endpoint
        self._dispatcher.forget(turn.group_id)
        if not turn.answer.done():  # the player may have stopped waiting
            turn.answer.set_result(message)
        return True

    def _fits(self, turn: TurnPrompt) -> bool:
        """Return whether every server can sample the turn. One that joined after the episode's start may be smaller."""
        return len(turn.token_ids) + turn.max_tokens <= self._fleet.max_model_len

    async def _play(self, request: GroupRequest) -> None:
        endpoints: set[str] = set()

        async def ask(prompt: TurnPrompt) -> TurnResult | None:
            for attempt in range(self._run.learner.max_group_attempts):
                sampled = await self._request(request, prompt, attempt)
                if sampled is not None:
                    endpoints.add(sampled.endpoint)
                    return sampled
            return None

        # After a resume, a group may be retried before any server has answered.
        await self._fleet.has_version.wait()
        most = self._run.learner.environment.max_episode_tokens or self._fleet.max_model_len
        num_episodes = self._run.learner.sampling.group_size
        played = await self._player.play(
            request.group_id, request.prompt, ask, num_episodes=num_episodes, max_tokens=most
        )
        self._num_lost += num_episodes - sum(one.stats.state in REWARDED for one in played.episodes)
        request.answered_by = endpoints.pop() if len(endpoints) == 1 else ""
        self._on_played(played)

    async def _request(self, request: GroupRequest, prompt: TurnPrompt, attempt: int) -> TurnResult | None:
        turn = TurnRequest(
            name=f"{request.group_id}/{self._life}/{prompt.episode}.{prompt.number}.{attempt}", slot=request.slot,
            attempt=request.attempt * self._run.learner.max_group_attempts + attempt, turn=prompt,
            answer=asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        try:
            await self._dispatcher.begin([turn])
            answer = await turn.answer
        except asyncio.CancelledError:
            await self._dispatcher.withdraw(turn)
            raise
        problem = answer.message if isinstance(answer, GroupFailed) else self._problem(answer, prompt)
        if isinstance(answer, Group) and problem is None:
            return TurnResult(answer, turn.answered_by)
        log.warning("turn %s failed: %s", turn.group_id, problem)
        return None

    def _problem(self, group: Group, prompt: TurnPrompt) -> str | None:
        """Return why a turn cannot be used, or None."""
        try:
            check_completions(group, 1, prompt.max_tokens, self._fleet.hello.model.vocab_size)
            if self._fleet.experts is not None:
                num_known = 0 if prompt.experts is None else len(prompt.experts)
                check_routed_experts(group, len(prompt.token_ids) - num_known, self._fleet.experts)
        except ProtocolError as error:
            return str(error)
        return None if any(len(one.token_ids) for one in group.completions) else "its completion has no tokens"
