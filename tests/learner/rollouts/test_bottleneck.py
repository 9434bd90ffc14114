"""The bottleneck of a run: waits are measured and attributed to the slow part."""

import time
from pathlib import Path

import pytest

from learner.report.run_log import console_line
from learner.rollouts.bottleneck import ServerIdleness, WaitTimes, held_up_by, shares
from protocol.messages import Generate, Message
from tests.learner.rollouts.hand_server import HandServer, answers, next_slots, published_on

SLOW_REWARD = {"functions": ["tests/learner/rewards/broken_rewards.py:slow"]}
SLOW_S = 0.5


def test_a_wait_moves_from_the_link_to_the_reward_when_the_group_arrives(tmp_path: Path) -> None:
    with HandServer() as server, published_on(tmp_path, server, reward=SLOW_REWARD) as rollouts:
        next_slots(rollouts)
        waits = rollouts.pop_metrics()
    assert waits["bottleneck/reward"] > waits["bottleneck/link"] + waits["bottleneck/server"]


def test_round_trip_time_beyond_the_servers_time_counts_for_the_link(tmp_path: Path) -> None:
    def slowly(server: HandServer, request: Generate) -> list[Message]:
        time.sleep(SLOW_S / 3)
        return answers(server, request)

    with HandServer(slowly) as server, published_on(tmp_path, server, max_staleness=0) as rollouts:
        next_slots(rollouts)
        waits = rollouts.pop_metrics()
    assert waits["bottleneck/link"] > SLOW_S / 2 > waits["bottleneck/server"] == 0.0


def test_the_wait_for_the_server_is_split_by_its_reported_times() -> None:
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
    waits.record_arrival(round_trip_s=1.0, server_s=7.0)  # generated once, requested twice
    assert waits.metrics()["bottleneck/link"] == pytest.approx(2.0 + 4.0 * 2 / 9)
    assert WaitTimes().metrics()["bottleneck/server"] == 0.0


class Heartbeats:
    """Idle and observed seconds of servers."""

    def __init__(self) -> None:
        self.time = (7.0, 90.0)
        self.idleness = ServerIdleness(lambda: self.time)

    def step(
        self, wait: tuple[float, float], rest: tuple[float, float], *, wait_s: float, step_s: float
    ) -> list[float]:
        """Return the idle share of a step and its seconds of the learner, given idle and observed seconds."""
        self.idleness.begin_wait()
        self._add(wait)
        self.idleness.end_wait()
        self._add(rest)
        return list(self.idleness.pop_metrics(step_s, wait_s).values())

    def _add(self, seconds: tuple[float, float]) -> None:
        self.time = (self.time[0] + seconds[0], self.time[1] + seconds[1])


def test_the_idle_share_of_the_servers_covers_the_whole_step() -> None:
    """Two servers generate for 40 s and then wait for 10 s of training."""
    seen = Heartbeats()
    assert seen.step((0.0, 80.0), (20.0, 20.0), wait_s=40.0, step_s=50.0) == pytest.approx([0.2, 10.0])
    # The rewards hold up the next step: the servers are idle while the learner waits.
    assert seen.step((40.0, 80.0), (0.0, 20.0), wait_s=40.0, step_s=50.0) == pytest.approx([0.4, 0.0])
    seen._add((5.0, 5.0))  # a checkpoint, counted before the wait
    assert seen.step((0.0, 0.0), (0.0, 15.0), wait_s=0.1, step_s=20.1) == pytest.approx([0.25, 5.0], rel=0.01)


def test_a_step_without_a_heartbeat_has_the_idle_share_of_the_step_before() -> None:
    seen = Heartbeats()
    assert seen.step((0.0, 0.0), (0.0, 0.0), wait_s=0.1, step_s=0.2) == []
    seen._add((100.0, 100.0))
    seen.idleness.restart()
    seen.step((0.1, 0.4), (0.0, 0.0), wait_s=0.1, step_s=0.2)
    assert seen.step((0.0, 0.0), (0.0, 0.0), wait_s=0.1, step_s=0.2) == pytest.approx([0.25, 0.025])


def test_the_part_with_the_largest_share_is_named_if_it_took_more_than_half() -> None:
    steps = [
        {"time/step": 10.0, "bottleneck/server": 2.0, "bottleneck/learner": 6.0},
        {"time/step": 30.0, "bottleneck/server": 20.0, "bottleneck/reward": 1.0},
    ]
    assert [held_up_by(step) for step in steps] == ["learner", "server"]
    assert held_up_by({"time/step": 10.0, "bottleneck/server": 5.0, "bottleneck/reward": 5.0}) is None
    assert held_up_by({}) is None
    assert list(shares(steps).items())[:3] == [("server", 0.55), ("learner", 0.15), ("reward", 0.025)]


def test_the_line_of_a_step_names_its_bottleneck() -> None:
    step = dict.fromkeys(
        ("time/wait_for_batch", "time/weight_sync", "staleness/mean", "perf/completion_tokens_per_s"), 0.5
    )
    step["time/step"] = 1.0
    line = console_line(1, 4, step | {"bottleneck/server": 0.6})
    assert line.endswith(" | waits: server") and "update skipped" in line, "a skipped update has no gradient norm"
    assert "waits" not in console_line(1, 4, step | {"bottleneck/server": 0.5})
