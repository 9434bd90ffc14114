"""How often a reward function may fail before it ends the run."""

import pytest

from learner.config import RewardConfig
from learner.rewards.scoring import RewardFailures
from learner.rewards.workers import FunctionRewards, GroupRewards
from protocol.errors import RewardError

OUTCOMES = {".": "ok", "f": "failed", "t": "timed_out"}


def num_groups_until_the_end(outcomes: str, **config: float) -> int | None:
    """Note one call for each character; return how many were noted when the run ended, None if it did not."""
    failures = RewardFailures(RewardConfig(functions=("f",), **config))
    for number, outcome in enumerate(outcomes, start=1):
        function = FunctionRewards(name="f", rewards=[], outcome=OUTCOMES[outcome], message=f"call {number}")
        try:
            failures.record(GroupRewards(rewards=[], functions=[function]))
        except RewardError:
            return number
    return None


@pytest.mark.parametrize(
    ("outcomes", "end"),
    [
        ("fff", 3),  # all of the first ones
        ("ttt", 3),
        (".f.t.f", 6),
        ("ff" + 98 * "." + 500 * ("f" + 9 * "."), None),  # a tenth is below the share
        (500 * "." + "f" + 500 * ".", None),
        (1000 * "." + 50 * "f", 1021),  # more than 20 of the last 100
        (40 * "." + 50 * "t", 51),  # 11 of 51
        (30 * (4 * "." + "f"), None),  # a fifth is not more than a fifth
        (30 * (4 * "." + "f") + "f", 151),
    ],
)
def test_a_run_ends_when_more_than_a_share_of_the_last_calls_is_broken(outcomes: str, end: int | None) -> None:
    assert num_groups_until_the_end(outcomes) == end


def test_the_share_is_configured_and_0_allows_none() -> None:
    assert num_groups_until_the_end(50 * "." + "t", max_failed_share=0.0) == 51
    assert num_groups_until_the_end(20 * "ff.", max_failed_share=0.7) == 11
    assert num_groups_until_the_end(20 * "f.", max_failed_share=0.7) is None


def test_each_function_is_judged_by_itself_and_the_error_shows_what_it_was_called_with() -> None:
    failures = RewardFailures(RewardConfig(functions=("f", "g")))

    def group(number: int) -> GroupRewards:
        fine = FunctionRewards(name="f", rewards=[1.0])
        broken = FunctionRewards(
            name="g", rewards=[None], outcome="failed" if number else "timed_out", message=f"call {number}"
        )
        return GroupRewards(rewards=[1.0], functions=[fine, broken])

    failures.record(group(0))
    failures.record(group(1))
    with pytest.raises(RewardError) as error:
        failures.record(group(2))
    assert str(error.value) == (
        "reward function g timed out 1 time and failed 2 times in its last 3 calls, more than "
        "learner.reward.max_failed_share = 0.2 allows (of the last 100, at first of 10):\n  call 0\n  call 1\n  call 2"
    )


def test_a_none_that_takes_the_reward_from_a_completion_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rewards = GroupRewards(
        rewards=[2.0, None, None],
        functions=[
            FunctionRewards(name="f", rewards=[1.0, None, None]),
            FunctionRewards(name="g", rewards=[1.0, 0.5, None]),
        ],
    )
    for on_none in ("skip", "unscorable"):
        failures = RewardFailures(RewardConfig(functions=("f", "g"), on_none=on_none))
        for _ in range(2):
            failures.record(rewards)
    (line,) = caplog.messages
    assert line.startswith("reward function f returned None for 1 of 3 completions that other functions scored")
    assert 'Set learner.reward.on_none = "skip"' in line


def test_a_none_that_takes_no_reward_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    only_watches = FunctionRewards(name="f", rewards=[None])
    timed_out = FunctionRewards(name="g", rewards=[None], outcome="timed_out", message="call 1")
    fine = FunctionRewards(name="h", rewards=[1.0])
    failures = RewardFailures(RewardConfig(functions=("f", "g", "h"), weights=(0.0, 1.0, 1.0)))
    failures.record(GroupRewards(rewards=[None], functions=[only_watches, timed_out, fine]))
    assert caplog.messages == ["call 1"]
