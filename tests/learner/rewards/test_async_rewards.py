"""Asynchronous reward functions: many calls in one event loop; and the logging of every function, as in TRL."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from learner.config import RewardConfig
from learner.prompts.prompts import Prompt
from learner.rewards.call import TrainerState
from learner.rewards.workers import FunctionRewards, GroupRewards, RewardWorkers
from learner.train import train
from tests.learner.model_engine import tiny_server
from tests.learner.rewards.scored_groups import DEADLINE_S, STATE, prompt
from tests.learner.runs import make_run, metrics_of, rows_of

FILE = Path(__file__).parent / "async_rewards.py"


def score(names: list[str], prompts: list[Prompt], **config: object) -> list[GroupRewards]:
    """Score groups of two completions, submitted together."""
    settings = RewardConfig(functions=tuple(f"{FILE}:{name}" for name in names), **config)  # type: ignore[arg-type]
    with RewardWorkers(settings) as workers:
        futures = [
            workers.submit(one, ["a", "b"], [[1], [2]], TrainerState(global_step=3, max_steps=9)) for one in prompts
        ]
        return [future.result(DEADLINE_S) for future in futures]


def outcomes(groups: list[GroupRewards]) -> list[str]:
    return [group.functions[0].outcome for group in groups]


# --- one loop for all calls --------------------------------------------------------------------------------------


def test_each_async_function_has_one_event_loop_for_all_calls() -> None:
    """A client created in one call must work in all later calls."""
    names = ["same_loop", "hands_a_coroutine_on", "judge_object", "partly", "takes_no_more_than_it_must"]
    for group in score(names, [prompt(seconds=0.0, answer="b")] * 12):
        assert group.by_function["same_loop"] == group.by_function["hands_a_coroutine_on"] == [1.0, 1.0]
        assert group.by_function["judge_object"] == [2.0, 2.0] and group.functions[3].outcome == "ok"
        assert group.by_function["takes_no_more_than_it_must"] == [0.0, 1.0]


def test_concurrent_calls_reach_the_limit_of_the_config() -> None:
    groups = score(["most_together"], [prompt()] * 10, max_concurrent_calls=3)
    assert max(reward for group in groups for reward in group.rewards if reward is not None) == 3


def test_two_functions_of_one_group_run_concurrently(tmp_path: Path) -> None:
    columns = {"mine": str(tmp_path / "mine"), "other": str(tmp_path / "other")}
    both = ["waits_for_the_other", "releases_the_other"]
    (group,) = score(both, [prompt(**columns)], num_workers=2, timeout_s=DEADLINE_S)
    assert group.rewards == [2.0, 2.0]


# --- isolation ---------------------------------------------------------------------------------------------------


def test_a_late_call_is_cancelled_without_affecting_others() -> None:
    seconds = [0.0, 1000.0, 0.0, 1000.0, 0.0]
    groups = score(["sleeps_on_request"], [prompt(seconds=s) for s in seconds], timeout_s=3, max_concurrent_calls=2)
    assert outcomes(groups) == ["ok", "timed_out", "ok", "timed_out", "ok"]
    assert "sleeps_on_request did not return within 3 s and was canceled" in str(groups[1].functions[0].message)
    assert len({groups[i].rewards[0] for i in (0, 2, 4)}) == 1  # one process throughout


def test_a_call_that_awaits_what_it_cancelled_has_failed_at_once() -> None:
    (group,) = score(["awaits_what_it_cancelled"], [prompt()], timeout_s=DEADLINE_S / 2)
    assert outcomes([group]) == ["failed"] and "raised CancelledError" in str(group.functions[0].message)


def test_a_call_that_blocks_the_event_loop_is_killed_and_later_calls_are_retried() -> None:
    seconds = [1000.0, 0.0, 0.0]
    groups = score(["blocks_on_request"], [prompt(seconds=s) for s in seconds], timeout_s=3, max_concurrent_calls=1)
    assert outcomes(groups) == ["timed_out", "ok", "ok"]
    assert "did not return within 3 s and was killed" in str(groups[0].functions[0].message)


def test_calls_in_flight_are_retried_when_their_process_is_killed(tmp_path: Path) -> None:
    groups = score(["is_killed_at_its_third_call"], [prompt(flag=str(tmp_path / "flag"))] * 8)
    assert (tmp_path / "flag").exists()
    assert [group.rewards for group in groups] == [[1.0, 1.0]] * 8


def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    with RewardWorkers(RewardConfig(functions=(f"{FILE}:sleeps_on_request",))) as workers:

        def process() -> int:
            group = workers.submit(prompt(seconds=0.0), ["a"], [[1]], STATE).result(DEADLINE_S)
            return int(group.rewards[0] or 0)

        before = process()
        os.kill(before, signal.SIGKILL)
        assert process() != before


def test_a_function_that_ends_its_process_has_failed() -> None:
    (group,) = score(["leaves"], [prompt()])
    assert (group.functions[0].outcome, group.rewards) == ("failed", [None, None])
    assert "ended its process with exit code 7" in str(group.functions[0].message)


def test_processes_are_replaced_after_a_number_of_calls() -> None:
    groups = score(["sleeps_on_request"], [prompt(seconds=0.01)] * 9, calls_per_worker=3, max_concurrent_calls=2)
    assert len({group.rewards[0] for group in groups}) == 3


# --- what TRL gives ----------------------------------------------------------------------------------------------


def test_a_function_knows_the_step_and_logs_metrics_and_columns() -> None:
    (group,) = score(["logs"], [prompt()])
    assert group.logged_metrics == {"words": [2.0], "steps_left": [6.0]}
    assert group.logged_extra == {"first": ["a", "b"]}
    assert '"words"' in group.to_json() and '"first"' not in group.to_json()


def test_values_that_several_functions_log_under_one_name_are_one_metric() -> None:
    functions = [
        FunctionRewards(name=name, rewards=[], metrics={"words": [number]}) for name, number in [("f", 1.0), ("g", 2.0)]
    ]
    assert GroupRewards(rewards=[], functions=functions).logged_metrics == {"words": [1.0, 2.0]}


def test_logged_values_and_the_overlong_penalty_reach_metrics_ledger_and_samples(
    tmp_path: Path,
) -> None:
    reward = {"functions": [f"{FILE}:logs"], "overlong_buffer_tokens": 3, "overlong_penalty": 0.5}
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=3, max_staleness=0, reward=reward)
        train(run, resume=False)
    lines = metrics_of(run)
    assert [line["reward/steps_left"] for line in lines] == [3.0, 2.0, 1.0]
    assert all(line["reward/words"] > 0 for line in lines)
    for line in lines:
        assert -0.5 <= line["reward/overlong"] < 0
        assert line["reward/mean"] == pytest.approx(line["reward/logs"] + line["reward/overlong"])
    assert all('"words"' in rewards and '"overlong"' in rewards for (rewards,) in rows_of(run, "rewards"))
    for line in (Path(run.run_dir) / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["extra"]["first"] == [text[:1] for text in sample["completions"]]


@pytest.mark.parametrize(
    "function",
    ["tests.learner.rewards.user_rewards:slow_on_request", "tests.learner.rewards.async_rewards:sleeps_on_request"],
)
def test_the_duration_of_a_call_excludes_calls_it_waited_for(function: str) -> None:
    name = function.partition(":")[2]
    with RewardWorkers(RewardConfig(functions=(function,), max_concurrent_calls=1)) as workers:
        started = time.monotonic()
        groups = [workers.submit(prompt(seconds=0.2), ["a"], [[7]], STATE) for _ in range(4)]
        for group in groups:
            group.result(DEADLINE_S)
        elapsed_s = time.monotonic() - started
        seconds = workers.latencies.pop_metrics()
    assert 0.15 < seconds[f"reward_seconds/{name}"] <= seconds[f"reward_seconds_max/{name}"]
    assert 4 * seconds[f"reward_seconds/{name}"] <= elapsed_s
