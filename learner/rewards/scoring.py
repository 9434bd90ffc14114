"""Scoring: a group as the server sent it becomes text, the reward functions say what it is worth, and the overlong penalty is
added. Between the rollouts and the reward workers.
"""

import asyncio

from transformers import PreTrainedTokenizerBase

from learner.config import LearnerConfig
from learner.prompts.prompts import Prompt
from learner.rewards.call import TrainerState
from learner.rewards.failures import RewardFailures
from learner.rewards.overlong import overlong_rewards, with_overlong
from learner.rewards.workers import GroupRewards, RewardWorkers
from protocol.messages import Group


class Scorer:
    """Scores groups; how many at a time, the reward workers say."""

    def __init__(self, config: LearnerConfig, tokenizer: PreTrainedTokenizerBase, workers: RewardWorkers) -> None:
        self._config, self._tokenizer, self._workers = config, tokenizer, workers
        self._failures = RewardFailures(config.reward)

    async def score(self, prompt: Prompt, group: Group, step: int) -> GroupRewards:
        """Call the reward functions, which are told of the step, and add the overlong penalty. Raises RewardError if one fails
        too often.
        """
        token_ids_G = [completion.token_ids.tolist() for completion in group.completions]
        texts_G = self._tokenizer.batch_decode(token_ids_G, skip_special_tokens=self._config.reward.skip_special_tokens)
        state = TrainerState(global_step=step, max_steps=self._config.steps)
        rewards = await asyncio.wrap_future(self._workers.submit(prompt, texts_G, token_ids_G, state))
        self._failures.note(rewards)
        config = self._config.reward
        if config.overlong_buffer_tokens is None:
            return rewards
        overlong_G = overlong_rewards(
            group.completions,
            self._config.sampling.max_tokens,
            config.overlong_buffer_tokens,
            config.overlong_penalty,
        )
        return with_overlong(rewards, overlong_G)
