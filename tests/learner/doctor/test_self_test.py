"""The self-test with engines that agree, that report wrong logprobs, and that sample during a weight sync."""

import asyncio
import itertools
import json
import math
import random
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from learner.doctor.noise import ComparedTokens, NoiseMeasurement, bounds, floor, format_measurement, problems
from learner.doctor.self_test import self_test
from protocol.config import to_toml
from protocol.messages import Completion, Sampling
from protocol.model_files import resolve_model
from tests.learner.config.settings import ALWAYS, Sections, load, merged
from tests.learner.in_process import run_here
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.runs import make_run


class LivesThroughAPush(ModelEngine):
    """Groups that enter under version 1 have one token when version 2 arrives, and continue with it."""

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
        behavior_logprobs = completion.behavior_logprobs.copy()
        behavior_logprobs[1:] += self.off_after_push
        versions = [(before, 1), (now, len(behavior_logprobs) - 1)]
        return msgspec.structs.replace(completion, behavior_logprobs=behavior_logprobs, versions=versions)


class Off(ModelEngine):
    """Samples correctly, but adds the next of `shifts` to each logprob until none is left."""

    def __init__(self, shifts: Iterable[float]) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self._shifts = iter(shifts)

    def _completion(self, prompt: list[int], index: int, sampling: Sampling) -> Completion:
        right = super()._completion(prompt, index, sampling)
        shifts = np.array([next(self._shifts, 0.0) for _ in right.token_ids], np.float32)
        return msgspec.structs.replace(right, behavior_logprobs=right.behavior_logprobs + shifts)


def test_agreeing_sides_differ_only_by_rounding_noise_also_across_a_weight_sync(
    tmp_path: Path,
) -> None:
    engine = LivesThroughAPush()
    before = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    with tiny_server(engine) as server:
        run = make_run(tmp_path, server.endpoint, optimizer={"learning_rate": 1.0})
        measured = self_test(run)
    assert [order.version for order in engine.orders] == [0, 1, 2, 3]
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights.items())
    assert not Path(run.run_dir).exists()
    assert problems(measured) == []
    assert measured.fresh is not None and measured.through_push is not None
    for tokens in (measured.fresh, measured.through_push):
        assert 0 < tokens.abs_logprob_mean <= tokens.abs_logprob_max <= 1e-5
        assert tokens.clipped_frac == tokens.outside_frac == 0 and tokens.ess == pytest.approx(1)
    assert measured.through_push.num_tokens >= 3 * 4  # the third of four batches of 3 groups of 4
    assert measured.fresh.num_tokens >= 2 * measured.through_push.num_tokens
    low, high = measured.bounds
    assert (low.key, high.key) == ("loss.clip_low", "loss.clip_high") and low.distance / low.noise > 1e4
    assert "learner.loss.clip_low = 0.2 is" in format_measurement(measured) and "times the noise" in format_measurement(
        measured
    )


def test_differences_only_after_a_weight_sync_point_to_the_sync(tmp_path: Path) -> None:
    with tiny_server(LivesThroughAPush(off_after_push=0.4)) as server:
        found = problems(self_test(make_run(tmp_path, server.endpoint)))
    assert re.search(
        r"sampled tokens is 0\.3\d* \(across a sync\), the bound.* server\.kv_cache_on_weight_sync", found[0]
    )


def test_a_server_that_ignores_the_temperature_is_reported(tmp_path: Path) -> None:
    sampling = {"group_size": 4, "max_tokens": 5, "temperature": 0.7}
    with tiny_server() as server:
        found = problems(self_test(make_run(tmp_path, server.endpoint, sampling=sampling)))
    assert re.search(r"logprobs are those of temperature 1 .*learner\.sampling\.temperature = 0\.7", found[0])


def test_noise_at_the_bounds_of_the_objective_is_a_problem_and_nans_are_counted(tmp_path: Path) -> None:
    """Noise of 0.01, as in bfloat16, is negligible for a clip of 0.2 but exceeds gspo's clip of 3e-4."""
    generator = random.Random(0)
    shifts = itertools.chain([math.nan] * 3, (generator.gauss(0, 0.01) for _ in itertools.count()))
    with tiny_server(Off(shifts)) as server:
        run = make_run(
            tmp_path, server.endpoint, loss={"objective": "gspo"}, parity={"max_mean_abs_logprob": 0.15},
            groups_per_step=6, sampling={"group_size": 8, "max_tokens": 5},
        )  # fmt: skip
        measured = self_test(run)
    not_finite, clipped, *found = problems(measured)
    assert measured.num_not_finite == 3 and "3 tokens have a NaN or inf logprob" in not_finite
    assert measured.fresh is not None and 0.005 < measured.fresh.abs_logprob_mean < 0.015
    assert measured.fresh.clipped_frac > 0
    assert "are clipped by gspo although the weights are the same" in clipped
    assert all(any(f"learner.loss.{key}" in problem for problem in found) for key in ("clip_low", "clip_high"))


def test_the_difference_that_quantization_makes_is_no_problem(tmp_path: Path) -> None:
    generator = random.Random(0)
    for quantization in ("fp8_per_tensor", ""):
        engine = Off(generator.gauss(0, 0.1) for _ in itertools.count())
        engine.limits = msgspec.structs.replace(engine.limits, quantization=quantization)
        with tiny_server(engine) as server:
            measured = self_test(make_run(tmp_path, server.endpoint, parity={"max_mean_abs_logprob": 0.15}))
        assert measured.is_quantized == bool(quantization)
        assert (problems(measured) == []) == bool(quantization)
        assert ("a server quantizes" in format_measurement(measured)) == bool(quantization)
    off = Off(itertools.repeat(1.5))
    off.limits = msgspec.structs.replace(off.limits, quantization="fp8_per_tensor")
    with tiny_server(off) as server:
        (problem,) = problems(self_test(make_run(tmp_path, server.endpoint)))
    assert "server and learner disagree" in problem


def test_the_command_prints_json_with_exit_0_or_a_table_and_the_problem_with_exit_2(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    with tiny_server() as server:
        config.write_text(to_toml(make_run(tmp_path, server.endpoint)))
        done = run_here("self-test", str(config), "--json", "--learner.loss.objective", "cispo")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == [] and result["measured"]["fresh"]["abs_logprob_mean"] <= 1e-5
    assert [bound["key"] for bound in result["measured"]["bounds"]] == ["loss.clip_high"]
    assert not (tmp_path / "run").exists()
    with tiny_server(Off(itertools.repeat(0.05))) as server:
        done = run_here("self-test", str(config), "--endpoint", server.endpoint)
    assert done.returncode == 2
    assert "mean |Δ logprob|" in done.stdout and "no completion was in the engine during a weight sync" in done.stdout
    assert re.search(
        r"error: server and learner disagree: the mean \|Δ logprob\| of sampled tokens is 0\.05 \(fresh\), "
        r"the bound is 0\.001 for float32.*the cause is in sampling", done.stderr,
    )  # fmt: skip


BOUNDS: list[tuple[Sections, dict[str, tuple[str, float]]]] = [
    ({}, {"loss.clip_low": ("token", 0.2), "loss.clip_high": ("token", 0.28)}),
    ({"loss.objective": "gspo"}, {"loss.clip_low": ("geometric", 3e-4), "loss.clip_high": ("geometric", 4e-4)}),
    ({"loss.objective": "dppo"}, {"loss.tv_low": ("probability", 0.2), "loss.tv_high": ("probability", 0.2)}),
    ({"off_policy_correction.anchor": "proximal", "off_policy_correction.weight": "mask",
      "off_policy_correction.granularity": "geometric", "off_policy_correction.max_weight": 1.01},
     {"off_policy_correction.max_weight": ("geometric", 0.01)}),
    ({"loss.objective": "reinforce", "off_policy_correction.max_binary_kl": 0.1},
     {"off_policy_correction.max_binary_kl": ("binary_kl", 0.1)}),
    ({"loss.objective": "reinforce", "off_policy_correction.weight": "mask",
      "off_policy_correction.granularity": "sequence", "off_policy_correction.min_weight": 0.25,
      "off_policy_correction.sequence_mask": 0.1},
     {"off_policy_correction.max_weight": ("sequence", 1.0), "off_policy_correction.min_weight": ("sequence", 0.75),
      "off_policy_correction.sequence_mask": ("geometric", 0.1)}),
]  # fmt: skip
"""Configs, each with the level and the distance of its bounds."""


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_a_table_without_rewards_has_no_share_of_clipped_tokens() -> None:
    tokens = ComparedTokens(
        logprobs_N=-np.ones(2), behavior_logprobs_N=-np.ones(2), is_held_N=np.zeros(2, bool),
        is_fresh_N=np.ones(2, bool), completion_N=np.zeros(2, int), num_not_finite=0,
    )  # fmt: skip
    for has_rewards in (True, False):
        measured = NoiseMeasurement(
            dtype="float32", objective="grpo", temperature=1.0, parity_bound=0.1, num_not_finite=0, through_push=None,
            fresh=floor(tokens, tokens.is_fresh_N), bounds=[], has_rewards=has_rewards,
        )  # fmt: skip
        assert ("clipped by grpo" in format_measurement(measured)) == has_rewards


def test_the_numbers_follow_their_formulas(tmp_path: Path) -> None:
    generator = random.Random(5)
    completions = [[generator.uniform(-0.2, 0.2) for _ in range(length)] for length in (1, 4, 2)]
    flat = [log_ratio for completion in completions for log_ratio in completion]
    behavior = [generator.uniform(-3, -0.1) for _ in flat]
    tokens = ComparedTokens(
        logprobs_N=np.array(behavior) + np.array(flat),
        behavior_logprobs_N=np.array(behavior),
        is_held_N=np.array([True, False, False, False, True, False, False]),
        is_fresh_N=np.ones(7, bool),
        completion_N=np.array([0, 1, 1, 1, 1, 2, 2]),
        num_not_finite=0,
    )
    ratios = [math.exp(log_ratio) for log_ratio in flat]
    mean = sum(ratios) / 7
    assert msgspec.structs.asdict(floor(tokens, np.ones(7, bool))) == pytest.approx(
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
    sampled = [math.exp(before) for before in behavior]
    after = [math.exp(before + log_ratio) for before, log_ratio in zip(behavior, flat, strict=True)]
    expected = {
        "token": sum(abs(ratio - 1) for ratio in ratios) / 7,
        "sequence": sum(abs(math.exp(sum(completion)) - 1) for completion in completions) / 3,
        "geometric": sum(abs(math.exp(sum(completion) / len(completion)) - 1) for completion in completions) / 3,
        "binary_kl": sum(max(binary_kl(p, q), binary_kl(q, p)) for p, q in zip(after, sampled, strict=True)) / 7,
        "probability": sum(abs(new - math.exp(old)) for new, old in zip(after, behavior, strict=True)) / 7,
    }
    for config, keys in BOUNDS:
        found = {bound.key: bound for bound in bounds(tokens, load(tmp_path, merged(ALWAYS, config)).learner)}
        assert found.keys() == keys.keys()
        for key, (level, distance) in keys.items():
            assert (found[key].level, found[key].distance) == (level, pytest.approx(distance))
            assert found[key].noise == pytest.approx(expected[level])
