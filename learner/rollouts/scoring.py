"""From a group as the server sent it to one that can be trained on: text, rewards, and back again from the ledger."""

import asyncio

import msgspec
from transformers import PreTrainedTokenizerBase

from learner.config import LearnerConfig
from learner.prompts.prompts import Prompt
from learner.rewards.failures import RewardFailures
from learner.rewards.overlong import overlong_rewards, with_overlong
from learner.rewards.workers import GroupRewards, RewardWorkers
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger_row import Row
from learner.rollouts.scored_group import UNKNOWN_VERSION, ScoredGroup, rewards_of, scored_group
from protocol.codec import unpack
from protocol.messages import Group


class Scorer:
    """Scores groups and recalls from the ledger what was scored before a restart."""

    def __init__(
        self, config: LearnerConfig, tokenizer: PreTrainedTokenizerBase, workers: RewardWorkers, ledger: Ledger
    ) -> None:
        self._config, self._tokenizer, self._workers, self._ledger = config, tokenizer, workers, ledger
        self._failures = RewardFailures(config.reward)

    async def score(self, prompt: Prompt, group: Group) -> GroupRewards:
        """Call the reward functions and add the overlong penalty. Raises RewardError if one fails too often."""
        token_ids_G = [completion.token_ids.tolist() for completion in group.completions]
        texts_G = self._tokenizer.batch_decode(token_ids_G, skip_special_tokens=True)
        rewards = await asyncio.wrap_future(self._workers.submit(prompt, texts_G, token_ids_G))
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

    def received(self, row: Row) -> Group:
        """Return a group that was received before a restart."""
        group = unpack(self._ledger.payload(row.group_id), Group)
        return msgspec.structs.replace(group, entered_version=UNKNOWN_VERSION)

    def scored(self, row: Row, prompt: Prompt) -> ScoredGroup:
        """Return a group that was scored before a restart."""
        return scored_group(row.slot, prompt, self.received(row), rewards_of(row))
