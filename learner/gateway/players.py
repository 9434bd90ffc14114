"""Players of the episodes of a run or an evaluation: environments, or agents in processes.

    prompt ─▶ (a session opens ─▶ the agent runs and asks the gateway ─▶ its reward or error)* ─▶ EpisodeGroup

`AgentPlayer` sits between the rollouts and the gateway, as environments/player.py does for environments.
`agent_host.py` runs in the process of an agent, which shares only a socket with the learner and can use any
interpreter.
Invariant: every episode ends in a state of environments/episode.py and closes its session, at the latest
after learner.environment.episode_deadline_s.
"""

import asyncio
import logging
import os
import re
import socket
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from learner.config import EnvironmentConfig, LearnerConfig, LearnerRun
from learner.environments.episode import EpisodeGroup, group_of
from learner.environments.player import Ask, Player
from learner.environments.process import Environments, limits_of
from learner.gateway.gateway import Gateway
from learner.gateway.session import Session
from learner.prompts.chat_template import ChatTemplate
from learner.prompts.prompts import Prompt, Prompts
from learner.sandbox.open_files import reserve_open_files
from learner.sandbox.pool import ProcessPool
from learner.sandbox.process import STARTUP_REMEDY, STARTUP_TIMEOUT_S, ProcessFailure, SandboxProcess
from learner.sandbox.start import ScriptChild
from learner.servers.loop_thread import LoopThread
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

AGENT_HOST = Path(__file__).with_name("agent_host.py")
MAX_ANSWER_BYTES = 16 << 20
CLOSE_TIMEOUT_S = 10.0


class AgentPlayer:
    """Player of one run's agents, used in its event loop."""

    def __init__(self, config: LearnerConfig, template: ChatTemplate, model: str) -> None:
        self._config = config
        self._reads_turns = config.advantage.credit != "episode" or config.advantage.function is not None
        self._agents = start_agent_pool(config.environment)
        self._gateway = Gateway(config, template, model)

    def start(self, loop: LoopThread, cleanup: ExitStack) -> None:
        """Start the gateway and check that an agent can start.

        Raises:
            ConfigError: Either fails.
        """
        cleanup.callback(lambda: loop.end(self._close(), CLOSE_TIMEOUT_S))
        loop.call(self._gateway.start(), CLOSE_TIMEOUT_S)
        loop.call(check_agent(self._config.environment, self._agents), STARTUP_TIMEOUT_S + CLOSE_TIMEOUT_S)
        log.info("gateway listening for agents at %s", self._gateway.base_url)

    async def play(
        self, group_id: str, prompt: Prompt, ask: Ask, *, num_episodes: int, max_tokens: int
    ) -> EpisodeGroup:
        """Play the group of a prompt. Episodes without a turn of the policy are left out."""
        numbers = range(num_episodes)
        played = await asyncio.gather(*(self._episode(prompt, number, ask, max_tokens) for number in numbers))
        return group_of(group_id, [(session.episode, session.entered_version) for session in played])

    async def _episode(self, prompt: Prompt, number: int, ask: Ask, max_tokens: int) -> Session:
        async with self._agents.lease() as agent:
            session = Session(self._config, prompt, number, ask, max_tokens)
            with self._gateway.opened(session) as key:
                request = EpisodeRequest({**prompt.columns, "prompt": prompt.prompt}, self._gateway.base_url, key)
                outcome = await agent.play(request, self._config.environment.episode_deadline_s)
                if self._agents.is_closed:
                    raise asyncio.CancelledError  # the run is ending, and the episode with it
                is_printed = self._config.environment.command is not None
                reward = _reward_of(outcome, session, by_turn=self._reads_turns, is_printed=is_printed)
                if isinstance(reward, ProcessFailure):
                    log.warning("the agent of prompt %d %s", prompt.prompt_id, reward.message)
                session.end(reward)
        return session

    async def _close(self) -> None:
        self._agents.close()
        await self._gateway.close()


def open_player(run: LearnerRun, prompts: Prompts, cleanup: ExitStack, *, asks_attributes: bool) -> Player | None:
    """Return the environments' player, or None if no environment plays the episodes.

    With `asks_attributes`, it also fetches the environments' final attributes, for the reward functions.

    Raises:
        ConfigError: The environment cannot be used.
    """
    config = run.learner
    if not config.environment.is_used or config.environment.has_agent:
        return None
    is_forked = config.environment.python is None
    num_pipes = 3 if is_forked else 2
    reserve_open_files(
        config.environment.max_concurrent, num_pipes, "environments (learner.environment.max_concurrent)"
    )
    environments = Environments(config.environment, takes_text=not prompts.are_conversations)
    cleanup.callback(environments.close)
    return Player(config, prompts.template, environments, asks_attributes=asks_attributes)


def open_agents(run: LearnerRun, prompts: Prompts, loop: LoopThread, cleanup: ExitStack) -> AgentPlayer | None:
    """Return the agents' player, or None if no agent plays the episodes.

    Raises:
        ConfigError: The agent cannot be used.
    """
    if not run.learner.environment.has_agent:
        return None
    num_files = 2  # its socket and a connection to the gateway
    reserve_open_files(run.learner.environment.max_concurrent, num_files, "agents (learner.environment.max_concurrent)")
    player = AgentPlayer(run.learner, prompts.template, run.model)
    player.start(loop, cleanup)
    return player


class AgentReward(msgspec.Struct, frozen=True):
    """Reward that an agent returned, possibly by completion id, or None."""

    reward: float | dict[str, float] | None


class AgentAnswer(msgspec.Struct, frozen=True):
    """Answer in the format of agent_host.py."""

    reward: float | dict[str, float] | None = None
    problem: str | None = None
    file_digests: dict[str, str] = {}
    """Digests of the agent's files, by path. Only the answer to its start has them."""


class EpisodeRequest(msgspec.Struct, frozen=True):
    """Request to play an episode."""

    row: dict[str, Any]
    base_url: str
    api_key: str


class AgentProcess(SandboxProcess):
    """A process for one agent, used in the learner's event loop."""

    channel = "socket"

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the process.

        Raises:
            ConfigError: Its interpreter cannot be started.
            OSError: The machine cannot start another process now.
        """
        kind = "command" if config.command is not None else "agent"
        self._is_kept = kind == "agent"  # what a command leaves running ends with its process
        python, spec = config.python or sys.executable, config.command or config.agent or ""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                child = ScriptChild(
                    python, AGENT_HOST, [theirs.fileno()], [kind, spec], without_proxy(config.gateway_host)
                )
            except (ConfigError, OSError):
                self._socket.close()
                raise
        super().__init__(child, limits_of(config))
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def load(self) -> ProcessFailure | None:
        """Wait until the agent is loaded, and return the ProcessFailure if that fails."""
        if self._streams is not None:
            return None
        self._streams = await asyncio.open_connection(sock=self._socket, limit=MAX_ANSWER_BYTES)
        answer = await self._answer(STARTUP_TIMEOUT_S, STARTUP_REMEDY)
        if isinstance(answer, ProcessFailure):
            await asyncio.to_thread(self.kill)
            return answer
        return None

    async def play(self, request: EpisodeRequest, deadline_s: float) -> AgentReward | ProcessFailure:
        """Play one episode and return the agent's reward."""
        self.has_pending_answer = True
        answer = await self.load() or await self._episode(request, deadline_s)
        if not self._is_kept:
            await asyncio.to_thread(self.kill)
        self.has_pending_answer = False
        return answer

    def close(self) -> None:
        """Kill the process and close its socket. Call this in the event loop."""
        self.kill()
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()

    async def _episode(self, request: EpisodeRequest, deadline_s: float) -> AgentReward | ProcessFailure:
        assert self._streams is not None
        self._streams[1].write(msgspec.json.encode(request, enc_hook=_plain) + b"\n")
        return await self._answer(deadline_s, "make it faster or raise learner.environment.episode_deadline_s")

    async def _answer(self, timeout_s: float, remedy: str) -> AgentReward | ProcessFailure:
        assert self._streams is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._streams[0].readline()
        except TimeoutError:
            return await asyncio.to_thread(self.end_overdue, timeout_s, remedy)
        except (OSError, ValueError):  # a reset, or more than MAX_ANSWER_BYTES
            line = b""
        if not line:
            return await asyncio.to_thread(self.end_closed)
        try:
            answer = msgspec.json.decode(line, type=AgentAnswer)
        except msgspec.DecodeError as error:
            return await asyncio.to_thread(self.end_invalid, error)
        self.user_files.compare(answer.file_digests)
        return AgentReward(answer.reward) if answer.problem is None else ProcessFailure("failed", answer.problem)


def start_agent_pool(config: EnvironmentConfig) -> ProcessPool[AgentProcess]:
    """Return the pool of a run's agents, used in its event loop."""
    return ProcessPool(partial(AgentProcess, config), limits_of(config), config.max_concurrent)


async def check_agent(config: EnvironmentConfig, agents: ProcessPool[AgentProcess]) -> None:
    """Start one process to check that the agent works.

    Raises:
        ConfigError: The process cannot load the agent.
    """
    process = agents.start()
    failure = await process.load()
    if failure is not None:
        raise ConfigError(f"{config.named}: {failure.message}")
    agents.release(process)


def without_proxy(host: str) -> dict[str, str]:
    """Return the environment variables for an agent: no proxy applies to the gateway."""
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    exempt = f"{known},{host}" if known else host
    return {**os.environ, "NO_PROXY": exempt, "no_proxy": exempt}


def _reward_of(
    outcome: AgentReward | ProcessFailure, session: Session, *, by_turn: bool, is_printed: bool
) -> float | ProcessFailure | None:
    """Return the reward of the episode, or a ProcessFailure for an unknown id or two ids of one turn.

    Rewards by completion are those of turns. With credit by turn, or an advantage function of the user, the episode has
    their sum, otherwise their mean, of which each turn has its share.
    """
    if isinstance(outcome, ProcessFailure):
        return outcome
    if not isinstance(outcome.reward, dict):
        return outcome.reward
    named = {_turn_id(name): name for name in outcome.reward}
    unknown = [name for name in outcome.reward if _turn_id(name) not in session.turns]
    if is_printed and len(unknown) == len(named):  # a line of a log
        return None
    if unknown:
        return ProcessFailure(
            "failed", f"returned a reward for {unknown[0]!r}, which is not the id of one of its completions"
        )
    if not named:
        return None
    twice = next((name for name in outcome.reward if named[_turn_id(name)] != name), None)
    if twice is not None:
        return ProcessFailure(
            "failed",
            f"returned rewards for {twice!r} and {named[_turn_id(twice)]!r}, which are the same turn; return one",
        )
    by_id = {turn_id: outcome.reward[name] for turn_id, name in named.items()}
    rewards = by_id if by_turn else {name: reward / len(by_id) for name, reward in by_id.items()}
    session.rate_turns(rewards)
    return sum(rewards.values())


def _turn_id(completion_id: str) -> str:
    """Return the turn of a completion. Each dialect has its own prefix, such as `chatcmpl-` or `resp_`."""
    return re.split("[-_]", completion_id)[-1]


def _plain(value: Any) -> Any:
    """Convert a column's value that JSON cannot represent."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
