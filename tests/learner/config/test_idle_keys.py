"""Keys without effect: each is reported in one line and ignored, so that a sweep may include it."""

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.learner.config.settings import ALWAYS, Sections, load, merged

FIXED = {"reference.kind": "fixed"}
EVERY = {"kl.coef": 0.1, "reference.kind": "every", "reference.every_steps": 3}
EMA = EVERY | {"reference.kind": "ema", "reference.alpha": 0.5}
ADAPTIVE = {"kl.coef": 0.1, "reference.kind": "adaptive", "reference.kl_threshold": 0.05}
DECOUPLED = {"off_policy_correction.anchor": "proximal", "off_policy_correction.weight": "truncate"}
UNWEIGHTED = {"off_policy_correction.weight": "none"}
TWO_REWARDS = {"reward.functions": ["exact_match", "share_right"]}
ON = {"kl.coef": 0.1} | FIXED
DISTILLED = ON | {"kl.place": "advantage", "reward.only_logged": True}

IDLE: list[tuple[Sections, str, Sections, Sections]] = [
    # keys without effect, what they need, other keys, a remedy
    ({"data.num_digits": 3}, "task", {"data.task": None, "data.path": "a.jsonl"},
        {"data.path": None, "data.task": "sort"}),
    ({"data.split": "test", "data.dataset_config": "main"}, "dataset", {}, {"data.task": None, "data.dataset": "d"}),
    ({"evaluation.dataset_config": "main"}, "dataset", {"evaluation.sets": {"a": {"dataset": "d"}}},
        {"evaluation.dataset": "d"}),
    ({"evaluation.split": "validation"}, "dataset", {"evaluation.sets": {"a": {"path": "a.jsonl"}}},
        {"evaluation.sets": {"b": {"dataset": "d"}}}),
    ({"reward.overlong_penalty": 2.0}, "overlong_buffer_tokens", {}, {"reward.overlong_buffer_tokens": 2}),
    ({"lora.alpha": 8.0, "lora.target_modules": []}, "rank above 0", {}, {"lora.rank": 4, "lora.target_modules": None}),
    ({"warm_start.learning_rate": 1e-3, "warm_start.rows_per_step": 64, "warm_start.answer_column": "gold"},
     "steps above 0", {}, {"warm_start.steps": 1}),
    ({"max_resamples": 3, "signal_reward": "exact_match"}, "dynamic_sampling = true", {}, {"dynamic_sampling": True}),
    ({"curriculum.decay": 0.1, "curriculum.reward": "none"}, 'kind = "pass_rate"', {},
     {"curriculum.kind": "pass_rate", "curriculum.reward": "exact_match"}),
    ({"curriculum.kind": "pass_rate"}, "easy_weight or hard_weight below 1, drop_above or drop_below",
     {"curriculum.easy_weight": 1, "curriculum.hard_weight": 1}, {"curriculum.hard_weight": 0.5}),
    ({"sampling.allow_partial_support": True}, "top_p below 1 or top_k above 0", {}, {"sampling.top_p": 0.9}),
    ({"max_auto_staleness": 3}, 'max_staleness = "auto"', {}, {"max_staleness": "auto"}),
    ({"weight_sync.overlap_with_training": True}, "max_staleness above 0", {"max_staleness": 0}, {"max_staleness": 1}),
    ({"advantage.combine": "normalize_then_sum"}, "two reward functions of nonzero weight", {}, TWO_REWARDS),
    ({"advantage.combine": "normalize_then_sum"}, "two reward functions of nonzero weight",
     TWO_REWARDS | {"reward.weights": [1.0, 0.0]}, {"reward.weights": [1.0, 0.5]}),
    ({"advantage.function": "a:b"}, "rewards to learn from", DISTILLED, {"reward.only_logged": False}),
    ({"advantage.combine": "normalize_then_sum"}, "rewards to learn from", DISTILLED | TWO_REWARDS,
     {"reward.only_logged": False}),
    ({"advantage.credit": "turn"}, "environment.factory, tools, agent or command", {}, {"environment.factory": "guess"}),
    ({"advantage.gamma": 0.5}, 'credit = "turn" or "gigpo"', {"environment.factory": "guess"},
     {"advantage.credit": "turn"}),
    ({"advantage.step_weight": 0.5}, 'credit = "gigpo"', {"environment.factory": "guess", "advantage.credit": "turn"},
     {"advantage.credit": "gigpo"}),
    ({"advantage.credit": "turn"}, "advantage.function unset",
     {"environment.factory": "guess", "advantage.function": "a:b"}, {"advantage.function": None}),
    ({"parity.max_time_share": 0.5}, "every_steps", {"parity.every_steps": 0}, {"parity.every_steps": 2}),
    ({"weight_sync.lora": "merged"}, "lora.rank above 0", {}, {"lora.rank": 4}),
    ({"checkpoint.keep_best": 3}, "reward.functions", DISTILLED | {"reward.functions": [], "reward.only_logged": False},
     {"reward.functions": ["exact_match"]}),
    ({"checkpoint.keep_best": 3}, "export_model = true", {"checkpoint.export_model": False},
     {"checkpoint.export_model": True}),
    ({"environment.timeout_s": 3.0}, "factory or tools", {"environment.agent": "a:b"},
     {"environment.agent": None, "environment.factory": "guess"}),
    ({"environment.python": "b"}, "factory, tools or agent", {"environment.command": "a"},
     {"environment.command": None, "environment.agent": "a:b"}),
    ({"reward.judge.url": "http://j"}, 'functions with "judge"', {}, {"reward.functions": ["judge"]}),
    # the loss
    ({"loss.clip_low": 0.2}, 'objective = "grpo" or "gspo" or "gmpo" or "clip_cov"', {"loss.objective": "reinforce"},
        {"loss.objective": "grpo"}),
    ({"loss.clip_high": 0.3}, 'objective = "grpo" or "gspo" or "gmpo" or "cispo" or "clip_cov"',
     {"loss.objective": "dppo"},
     {"loss.objective": "cispo"}),
    ({"loss.dual_clip": 1.1},
     'objective = "grpo" or "gspo" or "gmpo" or "dppo" or "ipo" or "clip_cov" or "kl_cov"', {"loss.objective": "sapo"},
     {"loss.objective": "grpo", "loss.dual_clip": 3.0}),
    ({"loss.tau_positive": 1.0, "loss.tau_negative": 1.0}, 'objective = "sapo"', {}, {"loss.objective": "sapo"}),
    ({"loss.tv_low": 0.1, "loss.tv_high": 0.1, "loss.log_ratio_penalty": 0.0}, 'objective = "dppo" or "ipo"', {},
     {"loss.objective": "dppo"}),
    ({"loss.power_positive": 1.0, "loss.decay_negative": 1.0}, 'objective = "vespo"', {}, {"loss.objective": "vespo"}),
    ({"loss.cov_low": 0.5, "loss.cov_high": 2.0}, 'objective = "clip_cov"', {"loss.objective": "kl_cov"},
     {"loss.objective": "clip_cov"}),
    ({"loss.parameters": {"width": 0.2}}, "a function of your own as objective", {}, {"loss.objective": "mine.py:f"}),
    ({"loss.entropy_coef_step": 0.1, "loss.max_entropy_coef": 0.5}, "entropy_target", {}, {"loss.entropy_target": 1.0}),
    ({"loss.clip_low": 0.1, "loss.dual_clip": 3.0}, "updates_per_batch above 1", DECOUPLED, {"updates_per_batch": 2}),
    ({"loss.cov_penalty": 0.5, "loss.cov_frac": 0.5}, "updates_per_batch above 1",
     DECOUPLED | {"loss.objective": "kl_cov"}, {"updates_per_batch": 2}),
    ({"loss.clip_low": 0.1}, "updates_per_batch above 1",
     DECOUPLED | {"loss.objective": "clip_cov", "loss.cov_frac": 0.5}, {"updates_per_batch": 2}),
    # the correction
    ({"off_policy_correction.proximal": "log_linear"}, 'anchor = "proximal"', {},
     {"off_policy_correction.anchor": "proximal"}),
    ({"off_policy_correction.granularity": "geometric", "off_policy_correction.max_weight": 2.0},
     'weight = "truncate" or "mask"', UNWEIGHTED, {"off_policy_correction.weight": "mask"}),
    ({"off_policy_correction.min_weight": 0.5, "off_policy_correction.weighted_completions": "negative"},
     'weight = "truncate" or "mask"', UNWEIGHTED, {"off_policy_correction.weight": "mask"}),
    ({"off_policy_correction.stale_token_weight": 0.5}, "max_token_staleness", {},
     {"off_policy_correction.max_token_staleness": 0}),
    ({"off_policy_correction.max_token_staleness": 2}, "max_staleness above 2", {"max_staleness": 2},
        {"max_staleness": 3}),
    ({"off_policy_correction.anchor": "proximal"}, "an objective with a ratio",
     {"off_policy_correction.weight": "truncate", "loss.objective": "reinforce"}, {"loss.objective": "cispo"}),
    (DECOUPLED, "max_staleness above 0", {"off_policy_correction.proximal": "log_linear", "max_staleness": 0},
     {"max_staleness": 1}),
    # the KL and the reference
    (FIXED, "kl.coef above 0", {}, {"kl.coef": 0.1}),
    ({"kl.estimator": "k1", "kl.importance_weighted": True, "kl.schedule": "target", "kl.target": 0.1,
      "kl.horizon_steps": 5}, "coef above 0", {}, ON),
    ({"kl.place": "reward", "kl.schedule": "linear", "kl.final_coef": 0.0}, "coef above 0", {},
     FIXED | {"kl.coef": 0.1, "kl.place": None}),
    ({"kl.final_coef": 0.0}, 'schedule = "linear"', ON, {"kl.schedule": "linear"}),
    ({"kl.schedule": "linear", "kl.final_coef": 0.1}, "a final_coef other than coef", ON, {"kl.final_coef": 0.2}),
    ({"kl.target": 0.1, "kl.horizon_steps": 5}, 'schedule = "target"', ON, {"kl.schedule": "target"}),
    ({"kl.importance_weighted": True}, 'place = "loss"', ON | {"kl.place": "reward", "advantage.scale": "batch"},
     {"kl.place": "loss"}),
    ({"reference.every_steps": 3}, 'kind = "every" or "ema" or "mixture"', ON, {"reference.kind": "every"}),
    ({"reference.num_snapshots": 2}, 'kind = "mixture"', EVERY, {"reference.kind": "mixture"}),
    ({"reference.alpha": 0.5}, 'kind = "ema"', EVERY, {"reference.kind": "ema"}),
    ({"reference.growth": 2.0}, 'kind = "every" or "adaptive"', EMA,
        {"reference.kind": "every", "reference.alpha": None}),
    ({"reference.patience": 2, "reference.reward_guard": False}, 'kind = "adaptive"', EVERY,
     ADAPTIVE | {"reference.every_steps": None}),
    ({"reference.device": "cpu"}, 'kind = "fixed" or "every" or "ema" or "adaptive" or "mixture"', {}, EVERY),
    ({"reference.timeout_s": 9.0}, "endpoint", ON, {"reference.endpoint": "tcp://127.0.0.1:1"}),
    ({"reference.device": "cpu"}, "endpoint unset", ON | {"reference.endpoint": "tcp://127.0.0.1:1"},
     {"reference.endpoint": None}),
    ({"reference.endpoint": "tcp://127.0.0.1:1"}, 'kind = "fixed" or "every" or "ema" or "adaptive" or "mixture"', {}, ON),
    ({"reference.max_every_steps": 9}, "growth", EVERY, {"reference.growth": 2.0}),
    ({"reference.growth": 2.0, "reference.max_every_steps": 3}, "a max_every_steps above every_steps", EVERY,
     {"reference.max_every_steps": 4}),
    ({"reference.min_every_steps": 3}, "a value above patience = 3", ADAPTIVE, {"reference.patience": 2}),
    ({"reference.min_every_steps": 1}, 'kind = "adaptive"',
     EVERY | {"reference.every_steps": 1, "reference.growth": 2.0, "reference.max_every_steps": 3},
     {"reference.min_every_steps": None}),
    ({"reference.min_every_steps": 1, "reference.growth": 2.0, "reference.max_every_steps": 2},
     "a value above patience = 3", ADAPTIVE, {"reference.max_every_steps": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("idle", "need", "beside", "remedy"), IDLE, ids=lambda value: str(value)[:60])
def test_a_key_without_effect_is_reported_and_ignored(
    idle: Sections, need: str, beside: Sections, remedy: Sections, tmp_path: Path
) -> None:
    without = merged(ALWAYS, beside)
    settings = merged(without, idle)
    run = load(tmp_path, settings)
    found = run.learner.idle_keys()
    assert {key: found.get(key) for key in idle} == dict.fromkeys(idle, need)
    assert found.keys() - idle.keys() <= beside.keys(), "idle only because of these keys"
    note = run.idle_keys_note() or ""
    assert all(f"learner.{key} = " in note for key in idle) and note.count(f" (needs {need})") == len(idle), note
    assert run.in_effect() == load(tmp_path, without).in_effect()
    assert not idle.keys() & load(tmp_path, merged(settings, remedy)).learner.idle_keys().keys()


def test_a_key_that_only_an_idle_key_would_use_is_reported_too(tmp_path: Path) -> None:
    run = load(tmp_path, merged(ALWAYS, {"advantage.credit": "gigpo", "advantage.gamma": 0.9, "curriculum.decay": 0.1}))
    assert run.learner.idle_keys().keys() == {"advantage.credit", "advantage.gamma", "curriculum.decay"}
    assert 'learner.advantage.gamma = 0.9 (needs credit = "turn" or "gigpo")' in (run.idle_keys_note() or "")


def test_a_config_without_such_keys_is_unchanged(tmp_path: Path) -> None:
    run = load(tmp_path, merged(ALWAYS, ADAPTIVE))
    assert run.idle_keys_note() is None and run.in_effect() == run


@pytest.mark.parametrize("kl", [{"kl.estimator": "k1"}, {"kl.place": "reward"}], ids=str)
def test_contradictory_keys_are_rejected_once_they_have_an_effect(kl: Sections, tmp_path: Path) -> None:
    settings = merged(ALWAYS, kl | FIXED)  # k1 in the loss; in the reward with scale = "group"
    load(tmp_path, settings)
    with pytest.raises(ConfigError, match=r'"k1" with place = "loss": .* is zero|advantage\.scale = "group"'):
        load(tmp_path, merged(settings, {"kl.coef": 0.1}))
