"""The self-test against engines that agree, that lie, and that were in the middle of a completion when a push came."""

import asyncio
import json
import math
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from learner.config import LearnerConfig
from learner.doctor.noise import ComparedTokens, as_text, bounds, floor, problems
from learner.doctor.self_test import self_test
from protocol.config import to_toml
from protocol.errors import ParityError
from protocol.messages import Completion, Sampling
from protocol.model_files import resolve_model
from tests.learner.forked_learner import run_learner
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.runs import make_run


class LivesThroughAPush(ModelEngine):
    """Groups that enter under version 1 have one token when version 2 comes, and go on after it."""

    def __init__(self, off_after_push: float = 0.0) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.off_after_push, self.has_version_2 = off_after_push, asyncio.Event()

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        if version == 2:
            self.has_version_2.set()

    async def sample(self, prompt_token_ids: np.ndarray, sampling: Sampling) -> tuple[list[Completion], int]:
        entered = self.version
        if entered != 1:
            return await super().sample(prompt_token_ids, sampling)
        await self.has_version_2.wait()
        completions, now = await super().sample(prompt_token_ids, sampling)
        return [self._across(completion, 1, now) for completion in completions], 1

    def _across(self, completion: Completion, before: int, now: int) -> Completion:
        if len(completion.token_ids) == 1:
            return msgspec.structs.replace(completion, versions=[(before, 1)])
        behaviour_logprobs = completion.behaviour_logprobs.copy()
        behaviour_logprobs[1:] += self.off_after_push
        versions = [(before, 1), (now, len(behaviour_logprobs) - 1)]
        return msgspec.structs.replace(completion, behaviour_logprobs=behaviour_logprobs, versions=versions)


class Off(ModelEngine):
    """Samples right and reports each logprob off by `shift(sampled tokens so far)`."""

    def __init__(self, shift: Any) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.shift = shift

    def _completion(self, prompt: list[int], index: int, sampling: Sampling) -> Completion:
        right = super()._completion(prompt, index, sampling)
        shifts = np.array([self.shift() for _ in right.token_ids], np.float32)
        return msgspec.structs.replace(right, behaviour_logprobs=right.behaviour_logprobs + shifts)


def command(tmp_path: Path, endpoint: str, *flags: str) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "run.toml"
    config.write_text(to_toml(make_run(tmp_path, endpoint)))
    return run_learner("self-test", str(config), *flags)


def test_sides_that_agree_have_a_floor_of_rounding_noise_before_and_through_a_push(tmp_path: Path) -> None:
    engine = LivesThroughAPush()
    with tiny_server(engine) as server:
        measured = self_test(make_run(tmp_path, server.endpoint))
    assert problems(measured) == []
    assert measured.fresh is not None and measured.through_push is not None
    for tokens in (measured.fresh, measured.through_push):
        assert 0 < tokens.abs_logprob_mean <= tokens.abs_logprob_max <= 1e-5
        assert tokens.clipped_frac == tokens.outside_frac == 0 and tokens.ess == pytest.approx(1)
    assert measured.through_push.num_tokens >= 3 * 4  # the third of four batches of 3 groups of 4
    assert measured.fresh.num_tokens >= 2 * measured.through_push.num_tokens
    low, high = measured.bounds
    assert (low.key, high.key) == ("loss.clip_low", "loss.clip_high") and low.distance / low.noise > 1e4
    assert "learner.loss.clip_low = 0.2 is" in as_text(measured) and "times the noise" in as_text(measured)


def test_the_same_weights_are_pushed_every_time_and_the_run_directory_is_left_alone(tmp_path: Path) -> None:
    engine = ModelEngine(resolve_model("tiny:digits"))
    before = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    with tiny_server(engine) as server:
        run = make_run(tmp_path, server.endpoint, optimizer={"learning_rate": 1.0})
        measured = self_test(run)
    assert [order.version for order in engine.orders] == [0, 1, 2, 3]
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights.items())
    assert not Path(run.run_dir).exists()
    assert measured.through_push is None and "no completion was in the engine during a weight sync" in as_text(measured)


def test_logprobs_that_are_off_are_named_with_their_size(tmp_path: Path) -> None:
    with tiny_server(Off(lambda: 0.05)) as server:
        (problem,) = problems(self_test(make_run(tmp_path, server.endpoint)))[:1]
    assert "mean |Δ logprob| of sampled tokens is 0.05 (fresh), the bound is 0.001 for float32" in problem
    assert "the cause is in sampling" in problem


def test_tokens_that_are_off_only_after_a_push_point_at_the_push(tmp_path: Path) -> None:
    with tiny_server(LivesThroughAPush(off_after_push=0.4)) as server:
        found = problems(self_test(make_run(tmp_path, server.endpoint)))
    assert re.search(
        r"sampled tokens is 0\.3\d* \(across a sync\), the bound.* server\.kv_cache_on_weight_sync", found[0]
    )


def test_a_server_that_ignores_the_temperature_is_reported(tmp_path: Path) -> None:
    sampling = {"group_size": 4, "max_tokens": 5, "temperature": 0.7}
    with tiny_server() as server:
        measured = self_test(make_run(tmp_path, server.endpoint, sampling=sampling))
    assert "logprobs are those of temperature 1" in problems(measured)[0]
    assert "learner.sampling.temperature = 0.7" in problems(measured)[0]


def test_a_wrong_score_stops_the_test_before_the_first_batch(tmp_path: Path) -> None:
    class Wrong(ModelEngine):
        async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int]:
            logprobs, version = await super().score(token_ids, replica)
            return logprobs - 0.01, version

    with (
        tiny_server(Wrong(resolve_model("tiny:digits"))) as server,
        pytest.raises(ParityError, match=r"fixed sequences is 0\.01"),
    ):
        self_test(make_run(tmp_path, server.endpoint))


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_noise_that_reaches_the_bounds_of_the_objective_is_a_problem(tmp_path: Path, objective: str) -> None:
    """Noise of 0.01 as of bfloat16: a clip of 0.2 does not see it, gspo's of 3e-4 sees little else."""
    noise = random.Random(0)
    with tiny_server(Off(lambda: noise.gauss(0, 0.01))) as server:
        run = make_run(
            tmp_path, server.endpoint, loss={"objective": objective}, parity={"max_mean_abs_logprob": 0.15},
            groups_per_step=6, sampling={"group_size": 8, "max_tokens": 5},
        )  # fmt: skip
        measured = self_test(run)
    found = problems(measured)
    if objective == "grpo":
        assert found == [] and 10 < measured.bounds[0].distance / measured.bounds[0].noise < 50
    else:
        assert measured.fresh is not None and measured.fresh.clipped_frac > 0
        assert "are clipped by gspo although the weights are the same" in found[0]
        assert all(any(f"learner.loss.{key}" in problem for problem in found) for key in ("clip_low", "clip_high"))


def test_a_logprob_that_is_no_number_is_counted_and_left_out(tmp_path: Path) -> None:
    shifts = iter([math.nan] * 3)
    with tiny_server(Off(lambda: next(shifts, 0.0))) as server:
        measured = self_test(make_run(tmp_path, server.endpoint))
    assert measured.num_not_finite == 3 and "3 tokens have a NaN or inf logprob" in problems(measured)[0]
    assert measured.fresh is not None and measured.fresh.abs_logprob_max < 1e-5


def test_the_command_prints_a_table_or_json_and_exits_0(tmp_path: Path) -> None:
    with tiny_server() as server:
        as_table = command(tmp_path, server.endpoint)
        as_json = command(tmp_path, server.endpoint, "--json", "--learner.loss.objective", "cispo")
    assert as_table.returncode == as_json.returncode == 0, as_table.stderr + as_json.stderr
    assert "server and learner agree" in as_table.stdout and "mean |Δ logprob|" in as_table.stdout
    result = json.loads(as_json.stdout)
    assert result["problems"] == [] and result["measured"]["fresh"]["abs_logprob_mean"] <= 1e-5
    assert [bound["key"] for bound in result["measured"]["bounds"]] == ["loss.clip_high"]
    assert not (tmp_path / "run").exists()


def test_the_command_exits_2_and_says_what_is_wrong(tmp_path: Path) -> None:
    with tiny_server(Off(lambda: 0.05)) as server:
        done = command(tmp_path, server.endpoint, "--json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: server and learner disagree: the mean |Δ logprob| of sampled tokens is 0.05 (fresh)" in done.stderr
    assert json.loads(done.stdout)["problems"]


def test_the_numbers_are_those_of_their_formulas() -> None:
    generator = random.Random(5)
    completions = [[generator.uniform(-0.2, 0.2) for _ in range(length)] for length in (1, 4, 2)]
    flat = [log_ratio for completion in completions for log_ratio in completion]
    behaviour = [generator.uniform(-3, -0.1) for _ in flat]
    tokens = ComparedTokens(
        logprobs_N=np.array(behaviour) + np.array(flat),
        behaviour_logprobs_N=np.array(behaviour),
        is_held_N=np.array([True, False, False, False, True, False, False]),
        is_fresh_N=np.ones(7, bool),
        completion_N=np.array([0, 1, 1, 1, 1, 2, 2]),
        num_not_finite=0,
    )
    ratios = [math.exp(log_ratio) for log_ratio in flat]
    mean = sum(ratios) / 7
    found = floor(tokens, np.ones(7, bool))
    assert msgspec.structs.asdict(found) == pytest.approx(
        {
            "num_tokens": 7,
            "abs_logprob_mean": sum(map(abs, flat)) / 7,
            "abs_logprob_max": max(map(abs, flat)),
            "ratio_mean": mean,
            "ratio_std": math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / 7),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "outside_frac": sum(not 0.9 <= ratio <= 1.1 for ratio in ratios) / 7,
            "mismatch_kl": sum(ratio - 1 - log_ratio for ratio, log_ratio in zip(ratios, flat, strict=True)) / 7,
            "clipped_frac": 2 / 7,
            "ess": sum(ratios) ** 2 / (7 * sum(ratio**2 for ratio in ratios)),
        }
    )
    expected = {
        "token": sum(abs(ratio - 1) for ratio in ratios) / 7,
        "sequence": sum(abs(math.exp(sum(completion)) - 1) for completion in completions) / 3,
        "geometric": sum(abs(math.exp(sum(completion) / len(completion)) - 1) for completion in completions) / 3,
        "probability": sum(
            abs(math.exp(before + log_ratio) - math.exp(before)) for before, log_ratio in zip(behaviour, flat, strict=True)
        ) / 7,
    }  # fmt: skip
    for config, keys in (
        ({}, {"loss.clip_low": ("token", 0.2), "loss.clip_high": ("token", 0.28)}),
        ({"loss": {"objective": "gspo"}}, {"loss.clip_low": ("geometric", 3e-4), "loss.clip_high": ("geometric", 4e-4)}),
        ({"loss": {"objective": "dppo"}}, {"loss.tv_low": ("probability", 0.2), "loss.tv_high": ("probability", 0.2)}),
        ({"loss": {"objective": "reinforce"}}, {}),
        (
            {
                "off_policy_correction": {"anchor": "proximal", "weight": "mask", "granularity": "geometric", "max_weight": 1.01},
            },
            {"off_policy_correction.max_weight": ("geometric", 0.01)},
        ),
        (
            {
                "loss": {"objective": "reinforce"},
                "off_policy_correction": {"weight": "mask", "granularity": "sequence", "min_weight": 0.25, "sequence_mask": 0.1},
            },
            {
                "off_policy_correction.max_weight": ("sequence", 1.0),
                "off_policy_correction.min_weight": ("sequence", 0.75),
                "off_policy_correction.sequence_mask": ("geometric", 0.1),
            },
        ),
    ):  # fmt: skip
        found_bounds = {bound.key: bound for bound in bounds(tokens, a_config(**config))}
        assert found_bounds.keys() == keys.keys()
        for key, (level, distance) in keys.items():
            assert (found_bounds[key].level, found_bounds[key].distance) == (level, pytest.approx(distance))
            assert found_bounds[key].noise == pytest.approx(expected[level])


def a_config(**sections: Any) -> LearnerConfig:
    needed = {"steps": 1, "data": {"task": "reverse"}, "reward": {"functions": ["exact_match"]}}
    return msgspec.convert(needed | sections, LearnerConfig)
