"""Scoring: the episodes of a group become text, the reward functions say what it is worth, and the overlong penalty is
added. Between the rollouts and the reward workers.
"""

import asyncio
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from learner.config import LearnerConfig
from learner.environments.episode import REWARDED, Episode
from learner.prompts.prompts import Prompt
from learner.rewards.call import TrainerState
from learner.rewards.failures import RewardFailures
from learner.rewards.overlong import overlong_rewards, with_overlong
from learner.rewards.workers import GroupRewards, RewardWorkers, without


class Scorer:
    """Scores groups; how many at a time, the reward workers say."""

    def __init__(self, config: LearnerConfig, tokenizer: PreTrainedTokenizerBase, workers: RewardWorkers) -> None:
        self._config, self._tokenizer, self._workers = config, tokenizer, workers
        self._failures = RewardFailures(config.reward)

    async def score(self, prompt: Prompt, episodes_G: Sequence[Episode], step: int) -> GroupRewards:
        """Call the reward functions, which are told of the step, and add the overlong penalty. Of an episode they see all that was
        said after the prompt: as messages where it converses. Raises RewardError if one fails too often.
        """
        last_G = [episode.branches[-1] for episode in episodes_G]
        token_ids_G = [branch.token_ids.tolist() for branch in last_G]
        texts_G = self._tokenizer.batch_decode(token_ids_G, skip_special_tokens=self._config.reward.skip_special_tokens)
        said_G = [episode.messages or text for episode, text in zip(episodes_G, texts_G, strict=True)]
        state = TrainerState(global_step=step, max_steps=self._config.steps)
        own_G = [episode.reward for episode in episodes_G] if self._config.environment.is_used else None
        rewards = await asyncio.wrap_future(self._workers.submit(prompt, said_G, token_ids_G, state, own_G))
        self._failures.note(rewards)
        rewards = without(rewards, [episode.course.state not in REWARDED for episode in episodes_G])
        config = self._config.reward
        if config.overlong_buffer_tokens is None:
            return rewards
        overlong_G = overlong_rewards(
            last_G,
            self._config.sampling.max_tokens,
            config.overlong_buffer_tokens,
            config.overlong_penalty,
        )
        return with_overlong(rewards, overlong_G)
