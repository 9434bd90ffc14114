"""Players of the episodes of a run or an evaluation: environments or agents."""

from contextlib import ExitStack

from learner.config import LearnerRun
from learner.environments.player import Player
from learner.environments.pool import Environments
from learner.gateway.agent_player import AgentPlayer
from learner.prompts.prompts import Prompts
from learner.servers.loop_thread import LoopThread


def open_player(run: LearnerRun, prompts: Prompts, cleanup: ExitStack, *, asks_attributes: bool) -> Player | None:
    """Return the environments' player, or None if no environment plays the episodes.

    With `asks_attributes`, it also fetches the environments' final attributes, for the reward functions.

    Raises:
        ConfigError: The environment cannot be used.
    """
    config = run.learner
    if not config.environment.is_used or config.environment.has_agent:
        return None
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
    player = AgentPlayer(run.learner, prompts.template, run.model)
    player.start(loop, cleanup)
    return player
