"""What holds a run up is said, and nothing grows meanwhile: whole runs, each with one part that is slow."""

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from learner import train as train_module
from learner.report.summary import as_text, summarize
from learner.rollouts.bottleneck import WaitTimes, held_up_by, learner_s, shares
from learner.train import train
from protocol.messages import Completion, Sampling
from protocol.model_files import resolve_model
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.rollouts.test_rollouts import TIMEOUT_S, HandServer, group_of, rollouts_on
from tests.learner.runs import GROUPS_PER_STEP, make_run, metrics_of
from tests.link import Link

MAX_STALENESS = 2
NUM_SLOW_STEPS = 2
SLOW_S = 1.0


class SlowEngine(ModelEngine):
    """Takes its time over every group."""

    def __init__(self, seconds: float) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.seconds = seconds

    async def sample(self, prompt_token_ids: Any, sampling: Sampling) -> tuple[list[Completion], int]:
        await asyncio.sleep(self.seconds)
        return await super().sample(prompt_token_ids, sampling)


@pytest.fixture
def slow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, float]]]:
    """Runs a few steps with one slow part and returns their metrics. At every step all groups are within the capacity."""

    def run_it(
        engine_s: float = 0, step_s: float = 0, bytes_per_s: float | None = None, **learner: Any
    ) -> list[dict[str, float]]:
        engine = SlowEngine(engine_s)
        train_on = train_module.train_on

        def slow_step(trainer: Any, groups: Any, version: int, timer: Any) -> dict[str, float]:
            num_allowed = (MAX_STALENESS + version + 1) * GROUPS_PER_STEP
            assert len(engine.prompts) <= num_allowed
            if (
                step_s and version < NUM_SLOW_STEPS
            ):  # time enough for all that the rule allows to come, and to be acknowledged
                time.sleep(step_s)
                assert len(engine.prompts) == num_allowed
                assert server.running.server.status()["groups_unacked"] == 0
            return train_on(trainer, groups, version, timer)

        monkeypatch.setattr(train_module, "train_on", slow_step)
        with tiny_server(engine) as server, closing(Link(int(server.endpoint.rpartition(":")[2]), bytes_per_s)) as link:
            run = make_run(tmp_path, f"tcp://127.0.0.1:{link.port}", max_staleness=MAX_STALENESS, **learner)
            train(run, resume=False)
        return metrics_of(run)

    return run_it


def test_a_slow_engine_is_said_to_be_waited_for(
    slow_run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    metrics = slow_run(engine_s=SLOW_S, steps=1)
    assert held_up_by(metrics[0]) == "server"
    assert sum(value for name, value in metrics[0].items() if name.startswith("bottleneck/")) <= metrics[0]["time/step"]
    assert "| waits: server\n" in capsys.readouterr().out
    assert "waits        mostly for the server's completions (" in as_text(summarize(tmp_path / "run"))


def test_a_slow_reward_is_said_to_be_waited_for(slow_run: Any) -> None:
    reward = {"functions": ["tests/learner/rewards/broken_rewards.py:slow"]}
    metrics = slow_run(reward=reward, steps=1)
    assert held_up_by(metrics[0]) == "reward"


def test_a_wait_turns_from_the_link_to_the_reward_when_the_group_has_come(tmp_path: Path) -> None:
    reward = {"functions": ["tests/learner/rewards/broken_rewards.py:slow"]}
    at_once = HandServer(lambda server, request: [group_of(request, 0)])
    with at_once as server, rollouts_on(server, tmp_path, reward=reward) as rollouts:
        rollouts.publish(0, server.server_id)
        assert rollouts.next_batch(0, TIMEOUT_S) is not None
    waits = rollouts.batch_metrics
    assert waits["bottleneck/reward"] > waits["bottleneck/link"] + waits["bottleneck/server"]


def test_a_slow_link_is_said_to_be_waited_for(slow_run: Any) -> None:
    # Longer completions than elsewhere, because the weight sync takes the link's time too.
    metrics = slow_run(bytes_per_s=1500, steps=1, sampling={"group_size": 4, "max_tokens": 40})
    assert held_up_by(metrics[0]) == "link"


def test_a_slow_step_is_said_to_be_waited_for(slow_run: Any) -> None:
    metrics = slow_run(step_s=2 * SLOW_S, steps=NUM_SLOW_STEPS + MAX_STALENESS + 1)
    assert held_up_by(metrics[1]) == "learner"


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
