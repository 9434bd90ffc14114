"""What holds a run up is measured, and attributed to the part that is slow."""

import time
from pathlib import Path

import pytest

from learner.report.run_log import console_line
from learner.rollouts.bottleneck import WaitTimes, held_up_by, learner_s, shares
from protocol.messages import Generate, Message
from tests.learner.rollouts.hand_server import HandServer, answers, next_slots, published_on

SLOW_REWARD = {"functions": ["tests/learner/rewards/broken_rewards.py:slow"]}
SLOW_S = 0.5


def test_a_wait_turns_from_the_link_to_the_reward_when_the_group_has_come(tmp_path: Path) -> None:
    with HandServer() as server, published_on(tmp_path, server, reward=SLOW_REWARD) as rollouts:
        next_slots(rollouts)
        waits = rollouts.batch_metrics
    assert waits["bottleneck/reward"] > waits["bottleneck/link"] + waits["bottleneck/server"]


def test_a_round_trip_that_the_server_does_not_account_for_is_the_links(tmp_path: Path) -> None:
    def slowly(server: HandServer, request: Generate) -> list[Message]:
        time.sleep(SLOW_S / 3)
        return answers(server, request)

    with HandServer(slowly) as server, published_on(tmp_path, server, max_staleness=0) as rollouts:
        next_slots(rollouts)
        waits = rollouts.batch_metrics
    assert waits["bottleneck/link"] > SLOW_S / 2 > waits["bottleneck/server"] == 0.0


def test_what_the_server_owed_is_divided_by_what_it_says_of_the_groups_that_came() -> None:
    waits = WaitTimes()
    waits.add("server", 4.0)
    waits.add("reward", 3.0)
    waits.add("link", 2.0)
    waits.record_arrival(round_trip_s=3.0, server_s=2.0)
    waits.record_arrival(round_trip_s=5.0, server_s=4.0)
    assert waits.metrics() == {
        "bottleneck/server": 3.0,
        "bottleneck/reward": 3.0,
        "bottleneck/link": 3.0,
        "bottleneck/weight_sync": 0.0,
    }
    waits.record_arrival(round_trip_s=1.0, server_s=7.0)  # generated once, asked for again
    assert waits.metrics()["bottleneck/link"] == pytest.approx(2.0 + 4.0 * 2 / 9)
    assert WaitTimes().metrics()["bottleneck/server"] == 0.0


def test_the_learner_is_waited_for_while_the_server_is_idle_and_no_batch_is_waited_for() -> None:
    metrics = {"time/step": 10.0, "time/wait_for_batch": 4.0}
    assert learner_s(metrics, server_idle_frac=0.5) == 3.0


def test_the_part_with_the_largest_share_is_named_if_it_took_more_than_half() -> None:
    steps = [
        {"time/step": 10.0, "bottleneck/server": 2.0, "bottleneck/learner": 6.0},
        {"time/step": 30.0, "bottleneck/server": 20.0, "bottleneck/reward": 1.0},
    ]
    assert [held_up_by(step) for step in steps] == ["learner", "server"]
    assert held_up_by({"time/step": 10.0, "bottleneck/server": 5.0, "bottleneck/reward": 5.0}) is None
    assert held_up_by({}) is None
    assert list(shares(steps).items())[:3] == [("server", 0.55), ("learner", 0.15), ("reward", 0.025)]


def test_the_line_of_a_step_names_what_held_it_up() -> None:
    step = dict.fromkeys(
        ("time/wait_for_batch", "time/weight_sync", "staleness/mean", "perf/completion_tokens_per_s"), 0.5
    )
    step["time/step"] = 1.0
    line = console_line(1, 4, step | {"bottleneck/server": 0.6})
    assert line.endswith(" | waits: server") and "update skipped" in line, "it has no norm of a gradient"
    assert "waits" not in console_line(1, 4, step | {"bottleneck/server": 0.5})
