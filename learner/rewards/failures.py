"""Which share of a reward function's last calls timed out or failed, and the end of the run when it is too large.

Beside scoring.py, which notes every group. One slow or broken completion costs its group that function's reward; a function
that is broken for many would train on what is left, so it is an error that shows what it was called with.
"""

import logging
from collections import defaultdict, deque

from learner.config import RewardConfig
from learner.rewards.workers import FunctionRewards, GroupRewards
from protocol.errors import RewardError

log = logging.getLogger(__name__)

WINDOW_CALLS = 100
MIN_CALLS = 10
"""The first calls are judged as if they were so many, or a single one would be a share of 1."""
NUM_EXAMPLES = 3


class RewardFailures:
    """The last calls of every function."""

    def __init__(self, config: RewardConfig) -> None:
        self._max_share = config.max_failed_share
        self._calls: defaultdict[str, deque[FunctionRewards]] = defaultdict(lambda: deque(maxlen=WINDOW_CALLS))

    def note(self, rewards: GroupRewards) -> None:
        """Raises RewardError, with examples, for a function that now fails too often."""
        for function in rewards.functions:
            calls = self._calls[function.name]
            calls.append(function)
            if function.outcome == "ok":
                continue
            log.warning("%s", function.message)
            broken = [call for call in calls if call.outcome != "ok"]
            if len(broken) > self._max_share * max(len(calls), MIN_CALLS):
                raise self._too_many(broken, len(calls))

    def _too_many(self, broken: list[FunctionRewards], num_calls: int) -> RewardError:
        num_timed_out = sum(call.outcome == "timed_out" for call in broken)
        examples = "".join(f"\n  {call.message}" for call in broken[-NUM_EXAMPLES:])
        return RewardError(
            f"reward function {broken[0].name} timed out {num_timed_out} times and failed {len(broken) - num_timed_out} times in "
            f"its last {num_calls} calls, more than learner.reward.max_failed_share = {self._max_share:g} allows (of the last "
            f"{WINDOW_CALLS}, at first of {MIN_CALLS}):{examples}"
        )
