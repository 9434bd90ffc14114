"""The arithmetic of the comparisons with TRL and of asynchronous training, and the workload of both sides."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bench import against_trl, pipeline, real_cell
from tests.bench.comparison import Rates, compare, compare_rewards
from tests.bench.good_share import BY_CHANCE, CHARACTERS, good_share
from tests.bench.steps import (
    Step,
    idle_frac,
    limit_frac,
    own_step,
    predicted_idle,
    reward_at,
    seconds_per_step,
    seconds_to_reward,
)
from tests.bench.trl_side import HeldOut, TrlRun, trl_job
from tests.bench.workload import WORKLOADS, Workload, write_model, write_prompts
from tests.bench.workload_run import Run, config_of

pytestmark = pytest.mark.system


def steps_of(
    durations: list[float], *, rewards: list[float] | None = None, lag: float = 0.0, wait_s: float = 0.0,
    length: float = 10.0
) -> list[Step]:  # fmt: skip
    rewards = rewards or [0.5] * len(durations)
    return [
        Step(
            ended_s=sum(durations[: i + 1]), version=max(0.0, i - lag), completion_length_mean=length,
            reward_mean=reward,
            wait_s=wait_s,
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip


def run_of(steps: list[Step], **more: float) -> Run:
    phases_s = {"time/step": more.get("step_s", 1.0), "time/wait_for_batch": more.get("wait_s", 0.0)}
    return Run(
        steps=steps, server_idle_frac=more.get("server_idle", 0.0),
        learner_idle_frac=more.get("learner_idle", 0.0), phases_s=phases_s,
    )  # fmt: skip


def test_the_first_steps_are_excluded_from_seconds_and_waits() -> None:
    steps = steps_of([100.0, 50.0, 2.0, 4.0, 3.0], wait_s=0.75)
    assert seconds_per_step(steps, 2) == 3.0
    assert idle_frac(steps, 2) == 0.25


def test_needed_tokens_are_each_prompt_once_and_all_completion_tokens() -> None:
    assert Workload("x", 100, 8).needed_tokens(7.5) == 32 * 100 + 256 * 7.5


def test_the_limit_is_six_operations_per_parameter_and_token_at_the_measured_rate() -> None:
    steps = steps_of([9.0, 2.0, 2.0], length=7.5)
    by_hand = (32 * 100 + 256 * 7.5) * 6 * 1000 / 1e7 / 2.0
    assert limit_frac(Workload("x", 100, 8), steps, 1, 1000, 1e7) == pytest.approx(by_hand)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_the_expected_length_assumes_an_end_probability_of_one_in_128(
    workload: Workload,
) -> None:
    p = 1 / 128
    survived = [(1 - p) ** t for t in range(workload.max_tokens)]
    assert workload.mean_length == pytest.approx(sum(survived))


def test_a_ratio_is_of_medians_and_unequal_lengths_are_reported() -> None:
    workload = WORKLOADS["b"]
    trl = [
        TrlRun(processes=1, threads=2, steps=steps_of([5.0, seconds, seconds], length=100.0))
        for seconds in (8.0, 12.0, 99.0)
    ]
    ours = [run_of(steps_of([5.0, seconds, seconds], length=104.0), learner_idle=0.25) for seconds in (4.0, 1.0, 5.0)]
    rates = Rates(num_cores=2, of_one=[2e9, 1e9, 9e9], of_all=[3e9, 1e9, 9e9])
    found = compare(workload, trl, ours, rates, num_parameters=1000, warm_up=1)
    assert found["samples_per_s_ratio"] == 12.0 / 4.0
    assert found["samples_per_s"] == {"trl": 256 / 12.0, "ours": 64.0}
    assert found["learner_busy_s"] == 3.0
    of_one_core = workload.needed_tokens(104.0) * 6 * 1000 / 2e9 / 4.0
    assert found["limit_frac_of_one_core"] == pytest.approx(of_one_core)
    assert found["limit_frac"] == pytest.approx(of_one_core * 2 / 3) and found["learner_threads"] == 2
    assert found["length_ratio"] == pytest.approx(1.04) and found["lengths_comparable"]
    longer = [run_of(steps_of([5.0, 4.0, 4.0], length=106.0)) for _ in range(3)]
    assert not compare(workload, trl, longer, rates, num_parameters=1000, warm_up=1)["lengths_comparable"]


def test_rewards_are_compared_at_the_same_versions_of_the_policy() -> None:
    risen = [0.1 * i for i in range(10)]
    stale = [max(0.0, reward - 0.2) for reward in risen]
    on_time = steps_of([1.0] * 10, rewards=risen)
    two_late = steps_of([1.0] * 10, rewards=stale, lag=2.0)
    assert reward_at(on_time, [5.5]) == pytest.approx(0.55)
    found = compare_rewards([on_time] * 3, [two_late] * 3)
    assert found["reward_difference"] == pytest.approx(0.0, abs=1e-12)
    assert found["reward_of_last_step"] == {"trl": pytest.approx(0.9), "ours": pytest.approx(0.7)}


def test_rewards_are_equal_within_three_standard_errors_over_repetitions() -> None:
    draw = random.Random(0)
    noisy = [steps_of([1.0] * 4, rewards=[0.5 + draw.gauss(0, 0.01)] * 4) for _ in range(8)]
    assert compare_rewards(noisy[:4], noisy[4:])["rewards_equal"]
    worse = [steps_of([1.0] * 4, rewards=[0.4 + draw.gauss(0, 0.01)] * 4) for _ in range(4)]
    assert not compare_rewards(noisy[:4], worse)["rewards_equal"]
    assert compare_rewards(noisy[:1], noisy[4:5])["rewards_equal"] is None


def test_the_time_to_a_reward_is_that_of_the_policy_and_not_of_training_on_its_samples() -> None:
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    on_time = steps_of([2.0] * 6, rewards=rewards)
    assert seconds_to_reward(on_time, 0.25) == pytest.approx(5.0)
    two_late = steps_of([2.0] * 8, rewards=[0.0, 0.0, *rewards], lag=2.0)
    assert seconds_to_reward(two_late, 0.25) == pytest.approx(5.0)
    assert seconds_to_reward(on_time, 0.45) is None


def test_the_faster_side_waits_for_the_slower() -> None:
    assert predicted_idle(2.0, 8.0) == {"server": 0.75, "learner": 0.0}
    assert predicted_idle(8.0, 2.0) == {"server": 0.0, "learner": 0.75}


def test_asynchronous_over_synchronous_is_the_ratio_of_seconds_to_the_same_reward() -> None:
    rewards = [0.1 * i for i in range(8)]
    runs = {
        "async": [run_of(steps_of([6.0] * 8, rewards=rewards), server_idle=0.6, learner_idle=0.0)] * 3,
        "sync": [run_of(steps_of([9.0] * 8, rewards=rewards), step_s=9.0, wait_s=3.0)] * 3,
    }
    found = pipeline.compare(runs, "b", target=0.4, warm_up=2)
    assert found["async_over_sync_b"] == pytest.approx(1.5)
    assert found["faster_side"] == "server" and found["idle_predicted"]["server"] == 0.5
    assert found["idle_explained"] == (abs(0.6 - 0.5) <= pipeline.IDLE_TOLERANCE)
    runs["async"] = [run_of(steps_of([6.0] * 8, rewards=rewards), server_idle=0.7)] * 3
    assert not pipeline.compare(runs, "b", target=0.4, warm_up=2)["idle_explained"]
    assert pipeline.compare(runs, "b", target=0.9, warm_up=2)["async_over_sync_b"] is None


def test_a_line_of_metrics_has_the_version_that_sampled_the_batch() -> None:
    line = {
        "step": 7, "elapsed_s": 3.0, "staleness/mean": 1.5, "rollout/completion_length_mean": 5.0, "reward/mean": 0.4,
        "time/wait_for_batch": 0.1,
    }  # fmt: skip
    assert own_step(line) == Step(ended_s=3.0, version=4.5, completion_length_mean=5.0, reward_mean=0.4, wait_s=0.1)


def test_the_reward_is_the_share_of_good_characters_or_chance_for_an_empty_text() -> None:
    good, bad = CHARACTERS[0], CHARACTERS[-1]
    assert good_share([good * 3 + bad, "", bad], answer=["", "", ""]) == [0.75, BY_CHANCE, 0.0]
    assert len(set(CHARACTERS)) == 127


def test_the_model_ends_a_completion_with_a_probability_near_one_in_128_at_every_token(tmp_path: Path) -> None:
    assert write_model(tmp_path) == 2_659_584
    write_prompts(WORKLOADS["b"], tmp_path / "b.jsonl")
    texts = [json.loads(line)["prompt"] for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    token_ids = torch.tensor(tokenizer(texts[:64])["input_ids"])
    assert token_ids.shape == (64, 13) and len(set(texts)) == len(texts)
    assert tokenizer.batch_decode(token_ids) == texts[:64]
    assert tokenizer.decode([*range(128)], skip_special_tokens=True) == CHARACTERS
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path)(token_ids).logits
    ends = logits.softmax(-1)[..., tokenizer.eos_token_id]
    assert math.isclose(ends.mean().item(), 1 / 128, rel_tol=0.02)


def test_both_sides_get_the_same_settings(tmp_path: Path) -> None:
    config = config_of(
        WORKLOADS["c"], tmp_path, tmp_path / "run", steps=9, learning_rate=0.003, max_staleness=2, seed=4
    )
    job = trl_job(config, rows=64)
    assert (job["steps"], job["seed"], job["max_tokens"], job["learning_rate"]) == (9, 4, 8, 0.003)
    assert (job["clip_low"], job["clip_high"], job["beta2"], job["max_grad_norm"]) == (0.2, 0.28, 0.95, 1.0)
    assert job["groups_per_step"] * job["num_completions"] == 256
    assert config.learner.loss.mean_over == "token" and config.learner.advantage.scale == "group"  # TRL's dapo, group


def test_the_commands_have_defaults() -> None:
    assert against_trl.parse_options([]).cells == ["a", "b", "c"]
    assert pipeline.parse_options(["--steps", "4"]).steps == 4


def test_seconds_to_the_target_end_at_the_first_evaluation_that_reaches_it() -> None:
    def curve(*rewards: float, s: float) -> list[HeldOut]:
        return [HeldOut(step=5 * i, elapsed_s=s * i, reward=reward) for i, reward in enumerate(rewards, start=1)]

    steps = steps_of([9.0, 9.0, 10.0, 10.0])
    ours = [
        real_cell.OurRun(steps=steps, evaluations=curve(0.3, 0.85, 0.7, s=s), learner_idle_frac=0.0, mismatch=0.07)
        for s in (10.0, 12.0, 11.0)
    ]
    trl = [TrlRun(1, 2, steps_of([50.0] * 4), curve(0.3, 0.5, 0.8, s=s)) for s in (50.0, 40.0, 60.0)]
    found = real_cell.compare(trl, ours, 256)
    assert found["time_to_reward_s"] == {"trl": [150.0, 120.0, 180.0], "ours": [20.0, 24.0, 22.0]}
    assert found["time_to_reward_ratio"] == 150 / 22 and found["samples_per_s_ratio"] == 5.0
    never = TrlRun(1, 2, steps_of([50.0] * 4), curve(0.3, 0.5, s=50.0))
    assert real_cell.compare([*trl[:2], never], ours, 256)["time_to_reward_ratio"] is None


def test_both_sides_of_the_real_cell_have_the_settings_of_the_recipe(tmp_path: Path) -> None:
    config = real_cell.config_of(tmp_path / "run", seed=3)
    job = trl_job(config, rows=64)
    assert (job["groups_per_step"], job["num_completions"], job["max_tokens"]) == (16, 16, 16)
    assert (job["learning_rate"], job["reward"], job["seed"]) == (1e-5, "last_number", 3)
    assert config.learner.optimizer.schedule == "constant" and config.learner.optimizer.warmup_steps == 0
    assert config.learner.evaluation.task == "sums_held_out" and config.learner.evaluation.every_steps == 5
    assert job["bf16"] == (config.dtype == "bfloat16")


def test_trls_environment_needs_no_package_of_slipstream() -> None:
    """The environment has TRL and its dependencies."""
    ours = ("msgspec", "zmq", "aiohttp", "vllm")
    program = f"import sys; sys.modules.update(dict.fromkeys({ours})); import tests.bench.trl_job"
    subprocess.run([sys.executable, "-c", program], check=True)
