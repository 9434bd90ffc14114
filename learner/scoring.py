"""From a group as the server sent it to one that can be trained on: text, rewards, and back again from the ledger."""

import asyncio
from collections import Counter

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from learner.batch import UNKNOWN_VERSION, ScoredGroup
from learner.config import LearnerConfig
from learner.data import Prompt
from learner.ledger import Ledger
from learner.ledger_row import Row
from learner.overlong import overlong_rewards, with_overlong
from learner.rewards import GroupRewards, RewardWorkers, raise_if_failed
from protocol.codec import unpack
from protocol.errors import RewardError
from protocol.messages import Group

MAX_TIMEOUTS_IN_A_ROW = 3


class Scorer:
    """Scores groups and recalls from the ledger what was scored before a restart."""

    def __init__(
        self, config: LearnerConfig, tokenizer: PreTrainedTokenizerBase, workers: RewardWorkers, ledger: Ledger
    ) -> None:
        self._config, self._tokenizer, self._workers, self._ledger = config, tokenizer, workers, ledger
        self._timeouts_in_a_row: Counter[str] = Counter()

    async def score(self, prompt: Prompt, group: Group) -> GroupRewards:
        """Call the reward functions and add the overlong penalty. Raises RewardError if one breaks its contract."""
        token_ids_G = [completion.token_ids.tolist() for completion in group.completions]
        texts_G = self._tokenizer.batch_decode(token_ids_G, skip_special_tokens=True)
        rewards = await asyncio.wrap_future(self._workers.submit(prompt, texts_G, token_ids_G))
        self._raise_if_broken(rewards)
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

    def _raise_if_broken(self, rewards: GroupRewards) -> None:
        """One slow completion costs its group that function's reward; a function that is always too slow is an error."""
        raise_if_failed(rewards)
        for function in rewards.functions:
            in_a_row = self._timeouts_in_a_row[function.name] + 1 if function.outcome == "timed_out" else 0
            self._timeouts_in_a_row[function.name] = in_a_row
            if in_a_row >= MAX_TIMEOUTS_IN_A_ROW:
                raise RewardError(f"{in_a_row} times in a row: {function.message}")

    def received(self, row: Row) -> Group:
        """Return a group that was received before a restart."""
        group = unpack(self._ledger.payload(row.group_id), Group)
        return msgspec.structs.replace(group, entered_version=UNKNOWN_VERSION)

    def scored(self, row: Row, prompt: Prompt) -> ScoredGroup:
        """Return a group that was scored before a restart."""
        return scored_group(row.slot, prompt, self.received(row), rewards_of(row))


def rewards_of(row: Row) -> GroupRewards:
    """Return what the ledger keeps of a scored group's rewards."""
    assert row.rewards is not None
    return msgspec.json.decode(row.rewards, type=GroupRewards)


def scored_group(slot: int, prompt: Prompt, group: Group, rewards: GroupRewards) -> ScoredGroup:
    """Put a group, its prompt and its rewards together."""
    return ScoredGroup(
        group_id=group.group_id,
        slot=slot,
        prompt_token_ids=np.array(prompt.token_ids, np.int32),
        completions=group.completions,
        rewards_G=rewards.rewards,
        rewards_by_function=rewards.by_function,
        num_timed_out=rewards.num_outcomes("timed_out"),
        entered_version=group.entered_version,
    )
