"""Select the scored groups that form a batch, and compute the metrics of each batch.

Dynamic sampling resamples a group without signal, until its step reaches the limit of resamples. The order of
scoring decides which of several such groups exceeds the limit. With max_staleness > 0 it also decides where
the later steps in flight start. None of these groups moves the policy.
Not thread-safe: rollout_buffer.py holds its lock.
"""

import logging
import statistics
from collections import Counter

from learner.algorithm.advantages import has_signal
from learner.algorithm.credit import tells_turns_apart, turn_rewards_differ
from learner.config import LearnerConfig
from learner.rewards.workers import GroupRewards
from learner.rollouts.rollout_group import RolloutGroup, step_rewards

log = logging.getLogger(__name__)


class Selection:
    """Selector of the scored groups that form batches."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        reward, name = config.reward, config.signal_reward
        self._signal_weights = {name: 1.0} if name else dict(zip(reward.names, reward.function_weights, strict=True))
        """Weights of the functions that define signal. An overlong penalty separates lengths, not answers."""
        self._num_calls: Counter[str] = Counter()
        """Calls of reward functions since the last batch, by outcome."""

    def count(self, rewards: GroupRewards) -> None:
        """Count the outcomes of a group's reward calls, even if the group is not used."""
        self._num_calls.update(function.outcome for function in rewards.functions)

    def accepts(self, group: RolloutGroup, num_replaced: int) -> bool:
        """Return whether a scored group is used, or else replaced by another prompt's group.

        `num_replaced`: number of groups that its step has replaced so far.
        """
        config = self._config
        is_full = num_replaced >= config.max_resamples * config.groups_per_step
        return not config.dynamic_sampling or is_full or self._has_signal(group)

    def metrics_of(self, groups: list[RolloutGroup], num_replaced: int) -> dict[str, float]:
        """Return the metrics of a batch, and begin to count for the next one."""
        num_lost = sum(self._config.sampling.group_size - len(group.rewards_G) for group in groups)
        metrics = {"rollout/lost_completions": float(num_lost)}
        metrics |= {
            f"rollout/rewards_{outcome}": float(self._num_calls[outcome])
            for outcome in ("timed_out", "failed", "unreachable")
        }
        self._num_calls.clear()
        metrics |= _logged(groups)
        num_without = sum(not self._has_signal(group) for group in groups)
        if self._config.reward.is_learned_from:
            metrics["batch/no_signal_groups"] = float(num_without)
        if self._config.dynamic_sampling:
            metrics["batch/replaced_groups"] = float(num_replaced)
            if num_without:
                self._warn_of_no_signal(num_without, num_replaced)
        return metrics

    def _has_signal(self, group: RolloutGroup) -> bool:
        config = self._config
        if has_signal(group.rewards_G, group.rewards_by_function, self._signal_weights, config.advantage):
            return True
        # Episodes with equal rewards may differ in when their turns earned them.
        if config.signal_reward is not None or not group.turns_G:
            return False
        rewards = step_rewards([group], config.reward)
        if config.advantage.function is not None:
            earned = any(turn.reward is not None for turns in group.turns_G for turn in turns)
            return earned and turn_rewards_differ(rewards)
        return config.advantage.credit != "episode" and tells_turns_apart(rewards, config.advantage)

    def _warn_of_no_signal(self, num_without: int, num_replaced: int) -> None:
        log.warning(
            "training on %d of %d groups without signal: this step has already replaced %d groups "
            "(learner.max_resamples = %d times groups_per_step); use prompts that are neither too hard nor solved",
            num_without,
            self._config.groups_per_step,
            num_replaced,
            self._config.max_resamples,
        )


def _logged(groups: list[RolloutGroup]) -> dict[str, float]:
    """Return the means of the values that reward functions logged."""
    names = {name for group in groups for name in group.logged_metrics}
    values = {name: [value for group in groups for value in group.logged_metrics.get(name, ())] for name in names}
    return {f"reward/{name}": statistics.fmean(values[name]) for name in sorted(names)}
