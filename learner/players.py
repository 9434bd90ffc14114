"""Who plays the episodes of a run, or of its evaluations: environments that answer the policy, agents that ask it, or nobody."""

from contextlib import ExitStack

from learner.config import LearnerRun
from learner.environments.player import Player
from learner.environments.pool import Environments
from learner.gateway.agent_player import AgentPlayer
from learner.prompts.prompts import Prompts
from learner.rewards.workers import RewardWorkers
from learner.servers.loop_thread import LoopThread


def open_player(run: LearnerRun, prompts: Prompts, rewards: RewardWorkers, cleanup: ExitStack) -> Player | None:
    """None where no environment plays the episodes. Raises ConfigError."""
    config = run.learner
    if not config.environment.is_used or config.environment.has_agent:
        return None
    environments = Environments(config.environment, takes_text=not prompts.are_conversations)
    cleanup.callback(environments.close)
    return Player(config, prompts.template, environments, asks_attributes=bool(rewards.with_environments))


def open_agents(run: LearnerRun, prompts: Prompts, loop: LoopThread, cleanup: ExitStack) -> AgentPlayer | None:
    """None where no agent plays the episodes. Raises ConfigError."""
    if not run.learner.environment.has_agent:
        return None
    player = AgentPlayer(run.learner, prompts.template, run.model)
    player.start(loop, cleanup)
    return player
