"""Who plays the episodes of a run: environments that answer the policy, agents that ask it, or nobody. Opened by leader.py."""

from contextlib import ExitStack

from learner.environments.player import Player
from learner.environments.pool import Environments
from learner.gateway.agent_player import AgentPlayer
from learner.material import Material
from learner.rewards.workers import RewardWorkers
from learner.servers.loop_thread import LoopThread


def open_player(material: Material, rewards: RewardWorkers, cleanup: ExitStack) -> Player | None:
    """None where completions are all there is. Raises ConfigError."""
    config = material.run.learner
    if not config.environment.is_used or config.environment.has_agent:
        return None
    environments = Environments(config.environment, takes_text=not material.prompts.are_conversations)
    cleanup.callback(environments.close)
    return Player(config, material.prompts.template, environments, asks_attributes=bool(rewards.with_environments))


def open_agents(material: Material, loop: LoopThread, cleanup: ExitStack) -> AgentPlayer | None:
    """None where no agent plays the episodes. Raises ConfigError."""
    config = material.run.learner
    if not config.environment.has_agent:
        return None
    player = AgentPlayer(config, material.prompts.template, material.run.model)
    player.start(loop, cleanup)
    return player
