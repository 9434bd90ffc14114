"""Score groups: decode episodes, call reward functions, add the overlong penalty, watch the functions' failures.

This sits between the rollouts and the reward workers. Suffix: _G over the completions of one group, each a branch.
One slow or broken completion costs its group that function's reward. A function that often fails would leave the run
to train on the remaining groups, so it raises an error that shows example calls.
Invariant: a completion that no function could score stays unscorable.
"""

import asyncio
import logging
from array import array
from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec
from transformers import PreTrainedTokenizerBase

from learner.config import LearnerConfig, RewardConfig
from learner.config.rewards import OVERLONG, ROUNDING
from learner.environments.episode import REWARDED, Episode, TokenSequence
from learner.prompts.prompts import Prompt
from learner.prompts.reasoning import OPENS_REASONING, opening_of, texts_of
from learner.prompts.tokenizer_threads import in_tokenizer_thread
from learner.rewards.call import TrainerState
from learner.rewards.workers import EpisodeResults, FunctionRewards, GroupRewards, RewardWorkers, spread
from protocol.console import counted
from protocol.errors import RewardError

log = logging.getLogger(__name__)

WINDOW_CALLS = 100
MIN_CALLS = 10
"""Minimum denominator of the failed share. Otherwise a single early failure would be a share of 1."""
NUM_EXAMPLES = 3


class Scorer:
    """Scorer of groups. The reward workers limit how many are scored at once."""

    def __init__(self, config: LearnerConfig, tokenizer: PreTrainedTokenizerBase, workers: RewardWorkers) -> None:
        self._config, self._tokenizer, self._workers = config, tokenizer, workers
        self._failures = RewardFailures(config.reward)

    async def score(self, prompt: Prompt, episodes_G: Sequence[Episode], step: int) -> GroupRewards:
        """Call the reward functions, which see the step, and add the overlong penalty.

        Raises:
            RewardError: A function fails too often, or a reward is negative with learner.advantage.scale = "mean".
        """
        if not self._config.reward.functions:  # on-policy distillation
            return GroupRewards(rewards=[0.0] * len(episodes_G), functions=[])
        rewards = await self.rate(prompt, episodes_G, TrainerState(global_step=step, max_steps=self._config.steps))
        self._failures.record(rewards)
        if self._config.advantage.scale == "mean":
            _require_positive(rewards, self._config)
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

        They see everything after the prompt of an episode, as messages if it is a conversation, with the reasoning
        that the prompt has opened. Episodes whose end state is not in REWARDED are not shown, because they are no
        evidence about the policy.
        """
        is_shown_G = [episode.stats.state in REWARDED for episode in episodes_G]
        shown = [episode for episode, is_shown in zip(episodes_G, is_shown_G, strict=True) if is_shown]
        environment = self._config.environment
        texts, plain_texts, token_ids = await in_tokenizer_thread(self._decode, shown)
        if environment.is_used:
            openings = await in_tokenizer_thread(self._openings, prompt, shown)
            texts, plain_texts = (list(map(str.__add__, openings, decoded)) for decoded in (texts, plain_texts))
            prompt = msgspec.structs.replace(prompt, opens_reasoning=False)
        completions, plain = (
            [episode.messages or text for episode, text in zip(shown, decoded, strict=True)]
            for decoded in (texts, plain_texts)
        )
        played = EpisodeResults(
            rewards=[episode.reward for episode in shown] if environment.is_used else None,
            attributes=[episode.attributes or {} for episode in shown] if environment.factory is not None else None,
        )
        rewards = await asyncio.wrap_future(
            self._workers.submit(prompt, completions, token_ids, state, played, built_in_completions=plain)
        )
        return spread(rewards, is_shown_G)

    def _decode(self, episodes: Sequence[Episode]) -> tuple[list[str], list[str], list[Sequence[int]]]:
        """Return the last branches as texts, as texts without special tokens, and as tokens."""
        token_ids: list[Sequence[int]] = [array("i", episode.branches[-1].token_ids.tolist()) for episode in episodes]
        plain = [text for one in token_ids for text in texts_of(self._tokenizer, [list(one)])]
        if self._config.reward.skip_special_tokens:
            return plain, plain, token_ids
        whole = [text for one in token_ids for text in texts_of(self._tokenizer, [list(one)], False)]
        return whole, plain, token_ids

    def _openings(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[str]:
        """Return the `<think>` that ends the prompt of each last branch, or ""."""
        of_row = OPENS_REASONING if prompt.opens_reasoning else ""
        prompts = [episode.branches[-1].prompt_token_ids for episode in episodes]
        return [of_row if own is None else opening_of(self._tokenizer, own.tolist()) for own in prompts]


def _require_positive(rewards: GroupRewards, config: LearnerConfig) -> None:
    """Raise RewardError if a mean of these rewards could be negative, before the ledger keeps them."""
    rewards_by_name = {"the total reward of a completion": rewards.rewards}
    if config.advantage.combine != "sum":
        weights = config.reward.weight_by_name
        rewards_by_name = {f"a reward of {name}": of for name, of in rewards.by_function.items() if weights[name] != 0}
    for name, values in rewards_by_name.items():
        lowest = min((value for value in values if value is not None), default=0.0)
        if lowest < -ROUNDING:
            raise RewardError(
                f'{name} is {lowest:g}, but learner.advantage.scale = "mean" divides by the mean reward of a group. '
                "Return rewards of at least 0, then continue with --resume"
            )


class RewardFailures:
    """The last calls of every function."""

    def __init__(self, config: RewardConfig) -> None:
        self._max_share = config.max_failed_share
        self._config = config
        self._returned_none: set[str] = set()
        """Functions for which the warning was logged."""
        self._calls: defaultdict[str, deque[FunctionRewards]] = defaultdict(lambda: deque(maxlen=WINDOW_CALLS))

    def record(self, rewards: GroupRewards) -> None:
        """Record the calls of a group.

        Raises:
            RewardError: A function now fails too often. The error shows examples.
        """
        self._warn_of_none(rewards)
        for function in rewards.functions:
            calls = self._calls[function.name]
            calls.append(function)
            if function.outcome == "ok":
                continue
            log.warning("%s", function.message)
            broken = [call for call in calls if call.outcome != "ok"]
            if len(broken) > self._max_share * max(len(calls), MIN_CALLS):
                raise self._too_many(broken, len(calls))

    def _warn_of_none(self, rewards: GroupRewards) -> None:
        """Warn once per function whose None voids the scores of another function."""
        if self._config.on_none == "skip":
            return
        weighed = [
            one for one in rewards.functions if self._config.weight_by_name[one.name] != 0 and one.outcome == "ok"
        ]
        for function in weighed:
            others = [other.rewards for other in weighed if other is not function]
            num_taken = sum(
                reward is None and any(scored is not None for scored in of_others)
                for reward, *of_others in zip(function.rewards, *others, strict=True)
            )
            if num_taken and function.name not in self._returned_none:
                self._returned_none.add(function.name)
                log.warning(
                    "reward function %s returned None for %d of %d completions that other functions scored; they have "
                    'no reward. To add up the others instead, start a new run with learner.reward.on_none = "skip"',
                    function.name, num_taken, len(function.rewards),
                )  # fmt: skip

    def _too_many(self, broken: list[FunctionRewards], num_calls: int) -> RewardError:
        num_timed_out = sum(call.outcome == "timed_out" for call in broken)
        examples = "".join(f"\n  {call.message}" for call in broken[-NUM_EXAMPLES:])
        return RewardError(
            f"reward function {broken[0].name} timed out {counted(num_timed_out, 'time')} and failed "
            f"{counted(len(broken) - num_timed_out, 'time')} in its last {counted(num_calls, 'call')}, more than "
            f"learner.reward.max_failed_share = {self._max_share:g} allows (of the last {WINDOW_CALLS}, at first of "
            f"{MIN_CALLS}):{examples}"
        )


def overlong_rewards(
    branches: Sequence[TokenSequence], max_tokens: int, buffer_tokens: int, penalty: float
) -> list[float]:
    """Return rewards_G, which fall linearly to -penalty at max_tokens.

    They are 0 up to max_tokens - buffer_tokens. This is DAPO's length reward (arXiv 2503.14476 eq. 13). A
    truncated completion gets the whole penalty, however short it is.
    """
    free_tokens = max_tokens - buffer_tokens
    return [
        -penalty
        if branch.finish_reason == "length"
        else penalty * min(0, free_tokens - len(branch.token_ids)) / buffer_tokens
        for branch in branches
    ]


def with_overlong(rewards: GroupRewards, overlong_G: list[float]) -> GroupRewards:
    """Add the penalty to every scorable reward, and list it alongside the functions."""
    scorable_G = [
        None if reward is None else penalty for reward, penalty in zip(rewards.rewards, overlong_G, strict=True)
    ]
    total_G = [
        None if reward is None or penalty is None else reward + penalty
        for reward, penalty in zip(rewards.rewards, scorable_G, strict=True)
    ]
    named = FunctionRewards(name=OVERLONG, rewards=scorable_G)
    return msgspec.structs.replace(rewards, rewards=total_G, functions=[*rewards.functions, named])
