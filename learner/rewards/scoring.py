"""Score groups: decode episodes, call reward functions, add the overlong penalty.

This sits between the rollouts and the reward workers.
"""

import asyncio
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from learner.config import LearnerConfig
from learner.environments.episode import REWARDED, Episode
from learner.prompts.prompts import Prompt
from learner.prompts.reasoning import texts_of
from learner.rewards.call import TrainerState
from learner.rewards.failures import RewardFailures
from learner.rewards.overlong import overlong_rewards, with_overlong
from learner.rewards.workers import GroupRewards, RewardWorkers, spread


class Scorer:
    """Scorer of groups. The reward workers limit how many are scored at once."""

    def __init__(self, config: LearnerConfig, tokenizer: PreTrainedTokenizerBase, workers: RewardWorkers) -> None:
        self._config, self._tokenizer, self._workers = config, tokenizer, workers
        self._failures = RewardFailures(config.reward)

    async def score(self, prompt: Prompt, episodes_G: Sequence[Episode], step: int) -> GroupRewards:
        """Call the reward functions, which see the step, and add the overlong penalty.

        Raises:
            RewardError: If a function fails too often.
        """
        rewards = await self.rate(prompt, episodes_G, TrainerState(global_step=step, max_steps=self._config.steps))
        self._failures.record(rewards)
        config = self._config.reward
        if config.overlong_buffer_tokens is None:
            return rewards
        overlong_G = overlong_rewards(
            [episode.branches[-1] for episode in episodes_G],
            self._config.sampling.max_tokens,
            config.overlong_buffer_tokens,
            config.overlong_penalty,
        )
        return with_overlong(rewards, overlong_G)

    async def rate(self, prompt: Prompt, episodes_G: Sequence[Episode], state: TrainerState) -> GroupRewards:
        """Call the reward functions.

        They see everything after the prompt of an episode, as messages if it is a conversation. Episodes
        whose end state is not in REWARDED are not shown, because they are no evidence about the policy.
        """
        is_shown_G = [episode.course.state in REWARDED for episode in episodes_G]
        shown = [episode for episode, is_shown in zip(episodes_G, is_shown_G, strict=True) if is_shown]
        token_ids = [episode.branches[-1].token_ids.tolist() for episode in shown]
        texts = texts_of(self._tokenizer, token_ids, self._config.reward.skip_special_tokens)
        completions = [episode.messages or text for episode, text in zip(shown, texts, strict=True)]
        environment = self._config.environment
        own = [episode.reward for episode in shown] if environment.is_used else None
        held = [episode.attributes or {} for episode in shown] if environment.factory is not None else None
        rewards = await asyncio.wrap_future(self._workers.submit(prompt, completions, token_ids, state, own, held))
        return spread(rewards, is_shown_G)
