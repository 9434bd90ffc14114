"""Play the episodes of agents, each in a process with its own gateway session.

    prompt ─▶ (a session opens ─▶ the agent runs and asks the gateway ─▶ its reward or error)* ─▶ EpisodeGroup

This sits between the rollouts and the gateway, as environments/player.py does for environments.
Invariant: every episode ends in a state of environments/episode.py and closes its session, at the latest
after learner.environment.episode_deadline_s.
"""

import asyncio
import logging
from contextlib import ExitStack

from learner.config import LearnerConfig
from learner.environments.episode import REWARDED, EpisodeGroup
from learner.environments.player import Ask
from learner.gateway.agent_process import AgentReward, EpisodeRequest, check_agent, start_agent_pool
from learner.gateway.gateway import Gateway
from learner.gateway.session import Session
from learner.prompts.chat_template import ChatTemplate
from learner.prompts.prompts import Prompt
from learner.sandbox.process import STARTUP_TIMEOUT_S, ProcessFailure
from learner.servers.loop_thread import LoopThread

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class AgentPlayer:
    """Player of one run's agents, used in its event loop."""

    def __init__(self, config: LearnerConfig, template: ChatTemplate, model: str) -> None:
        self._config = config
        self._agents = start_agent_pool(config.environment)
        self._gateway = Gateway(config, template, model)

    def start(self, loop: LoopThread, cleanup: ExitStack) -> None:
        """Start the gateway and check that an agent can start.

        Raises:
            ConfigError: If either fails.
        """
        cleanup.callback(lambda: loop.call(self._close(), CLOSE_TIMEOUT_S))
        loop.call(self._gateway.start(), CLOSE_TIMEOUT_S)
        loop.call(check_agent(self._config.environment, self._agents), STARTUP_TIMEOUT_S + CLOSE_TIMEOUT_S)
        log.info("gateway listening for agents at %s", self._gateway.base_url)

    async def play(
        self, group_id: str, prompt: Prompt, ask: Ask, *, num_episodes: int, max_tokens: int
    ) -> EpisodeGroup:
        """Play the group of a prompt. Episodes without a turn of the policy are left out."""
        numbers = range(num_episodes)
        played = await asyncio.gather(*(self._episode(prompt, number, ask, max_tokens) for number in numbers))
        entered = [session.entered_version for session in played if session.entered_version is not None]
        episodes = [session.episode for session in played]
        for episode in episodes:
            if episode.course.state not in REWARDED:
                log.warning("an episode of group %s ended as %s", group_id, episode.course.state)
        return EpisodeGroup(
            group_id=group_id,
            entered_version=min(entered, default=0),
            episodes=[episode for episode in episodes if episode.branches],
        )

    async def _episode(self, prompt: Prompt, number: int, ask: Ask, max_tokens: int) -> Session:
        async with self._agents.lease() as agent:
            session = Session(self._config, prompt, number, ask, max_tokens)
            with self._gateway.opened(session) as key:
                request = EpisodeRequest({"prompt": prompt.prompt, **prompt.columns}, self._gateway.base_url, key)
                outcome = await agent.play(request, self._config.environment.episode_deadline_s)
                if self._agents.is_closed:
                    raise asyncio.CancelledError  # the run is ending, and the episode with it
                reward = _reward_of(outcome, session)
                if isinstance(reward, ProcessFailure):
                    log.warning("the agent of prompt %d %s", prompt.prompt_id, reward.message)
                session.end(reward)
        return session

    async def _close(self) -> None:
        self._agents.close()
        await self._gateway.close()


def _reward_of(outcome: AgentReward | ProcessFailure, session: Session) -> float | ProcessFailure | None:
    """Return the reward of the episode, or a ProcessFailure for an unknown id.

    Rewards by completion are averaged, because the branches of an episode share an advantage.
    """
    if isinstance(outcome, ProcessFailure):
        return outcome
    if not isinstance(outcome.reward, dict):
        return outcome.reward
    by_id = outcome.reward
    unknown = [name for name in by_id if name.rpartition("-")[2] not in session.turn_ids]
    if unknown:
        return ProcessFailure(
            "failed", f"returned a reward for {unknown[0]!r}, which is not the id of one of its completions"
        )
    return sum(by_id.values()) / len(by_id) if by_id else None
