"""From a group as the server sent it to one that can be trained on: text, rewards, ledger."""

import asyncio

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from learner.batch import ScoredGroup
from learner.data import Prompts
from learner.ledger import Ledger, Row
from learner.rewards import GroupRewards, RewardWorkers, raise_if_broken
from protocol.codec import unpack
from protocol.messages import Group


class Scorer:
    """Scores groups and recalls from the ledger what was scored before a restart."""

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: PreTrainedTokenizerBase,
        workers: RewardWorkers,
        ledger: Ledger,
    ) -> None:
        self._prompts, self._tokenizer, self._workers, self._ledger = prompts, tokenizer, workers, ledger

    async def score(self, slot: int, group: Group) -> ScoredGroup:
        """Call the reward functions and commit their verdict. Raises RewardError if one breaks its contract."""
        token_ids_G = [completion.token_ids.tolist() for completion in group.completions]
        texts_G = self._tokenizer.batch_decode(token_ids_G, skip_special_tokens=True)
        prompt = self._prompts.prompt_at(slot)
        rewards = await asyncio.wrap_future(self._workers.submit(prompt, texts_G, token_ids_G))
        raise_if_broken(rewards)
        scorable = [reward for reward in rewards.rewards if reward is not None]
        mean = sum(scorable) / len(scorable) if scorable else None
        self._ledger.score(group.group_id, msgspec.json.encode(rewards).decode(), mean)
        return self._scored(slot, group, rewards)

    def received(self, row: Row) -> Group:
        """Return a group that was received before a restart."""
        return unpack(self._ledger.payload(row.group_id), Group)

    def scored(self, row: Row) -> ScoredGroup:
        """Return a group that was scored before a restart."""
        assert row.rewards is not None
        return self._scored(row.slot, self.received(row), msgspec.json.decode(row.rewards, type=GroupRewards))

    def _scored(self, slot: int, group: Group, rewards: GroupRewards) -> ScoredGroup:
        return ScoredGroup(
            group_id=group.group_id,
            slot=slot,
            prompt_token_ids=np.array(self._prompts.prompt_at(slot).token_ids, np.int32),
            completions=group.completions,
            rewards_G=rewards.rewards,
            rewards_by_function=rewards.by_function,
        )
