"""Stop the run when too large a share of a reward function's last calls fails.

`scoring.py` records every group here. One slow or broken completion costs its group that function's reward. A
function that often fails would leave the run to train on the remaining groups. It therefore raises an error
that shows example calls.
"""

import logging
from collections import defaultdict, deque

from learner.config import RewardConfig
from learner.rewards.workers import FunctionRewards, GroupRewards
from protocol.console import counted
from protocol.errors import RewardError

log = logging.getLogger(__name__)

WINDOW_CALLS = 100
MIN_CALLS = 10
"""Minimum denominator of the failed share. Otherwise a single early failure would be a share of 1."""
NUM_EXAMPLES = 3


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
            RewardError: If a function now fails too often. The error shows examples.
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
                    "no reward. "
                    'Set learner.reward.on_none = "skip" to add up the others instead',
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
