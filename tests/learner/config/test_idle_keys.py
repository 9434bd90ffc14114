"""A key that does nothing beside the others is named in one line and is as if it were not set, so a sweep may pass through it."""

from pathlib import Path

import pytest

from learner.config.algorithm import OBJECTIVE_DEFAULTS
from protocol.errors import ConfigError
from tests.learner.config.settings import ALWAYS, Sections, load, merged

FIXED = {"reference": {"kind": "fixed"}}
EVERY = {"kl": {"coef": 0.1}, "reference": {"kind": "every", "every_steps": 3}}
ADAPTIVE = {"kl": {"coef": 0.1}, "reference": {"kind": "adaptive", "kl_threshold": 0.05}}
DECOUPLED = {"off_policy_correction": {"anchor": "proximal", "weight": "truncate"}}
TWO_REWARDS = {"reward": {"functions": ["exact_match", "share_right"]}}

IDLE: list[tuple[Sections, dict[str, str], Sections]] = [
    # settings, the keys of them that do nothing with what each needs, a remedy
    ({"data": {"task": None, "path": "a.jsonl", "num_digits": 3}}, {"data.num_digits": "task"},
     {"data": {"path": None, "task": "sort"}}),
    ({"data": {"split": "test", "dataset_config": "main"}}, {"data.split": "dataset", "data.dataset_config": "dataset"},
     {"data": {"task": None, "dataset": "d"}}),
    ({"reward": {"overlong_penalty": 2.0}}, {"reward.overlong_penalty": "overlong_buffer_tokens"},
     {"reward": {"overlong_buffer_tokens": 2}}),
    ({"lora": {"alpha": 8.0, "target_modules": []}}, {"lora.alpha": "rank above 0", "lora.target_modules": "rank above 0"},
     {"lora": {"rank": 4, "target_modules": None}}),
    ({"warm_start": {"learning_rate": 1e-3, "rows_per_step": 64, "answer_column": "gold"}},
     dict.fromkeys(("warm_start.learning_rate", "warm_start.rows_per_step", "warm_start.answer_column"), "steps above 0"),
     {"warm_start": {"steps": 1}}),
    ({"max_resamples": 3}, {"max_resamples": "dynamic_sampling = true"}, {"dynamic_sampling": True}),
    ({"signal_reward": "exact_match"}, {"signal_reward": "dynamic_sampling = true"}, {"dynamic_sampling": True}),
    ({"curriculum": {"decay": 0.1, "reward": "none"}},
     dict.fromkeys(("curriculum.decay", "curriculum.reward"), 'kind = "pass_rate"'),
     {"curriculum": {"kind": "pass_rate", "reward": "exact_match"}}),
    ({"curriculum": {"kind": "pass_rate", "easy_weight": 1, "hard_weight": 1}},
     {"curriculum.kind": "easy_weight or hard_weight below 1, drop_above or drop_below"},
     {"curriculum": {"hard_weight": 0.5}}),
    ({"sampling": {"allow_partial_support": True}}, {"sampling.allow_partial_support": "top_p below 1 or top_k above 0"},
     {"sampling": {"top_p": 0.9}}),
    ({"max_auto_staleness": 3}, {"max_auto_staleness": 'max_staleness = "auto"'}, {"max_staleness": "auto"}),
    ({"weight_sync": {"overlap_with_training": True}, "max_staleness": 0}, {"weight_sync.overlap_with_training": "max_staleness above 0"}, {"max_staleness": 1}),
    ({"advantage": {"combine": "normalize_then_sum"}}, {"advantage.combine": "two reward functions of nonzero weight"},
     TWO_REWARDS),
    (TWO_REWARDS | {"advantage": {"combine": "normalize_then_sum"}, "reward": TWO_REWARDS["reward"] | {"weights": [1.0, 0.0]}},
     {"advantage.combine": "two reward functions of nonzero weight"}, {"reward": {"weights": [1.0, 0.5]}}),
    # the loss
    ({"loss": {"objective": "reinforce", "clip_low": 0.2}}, {"loss.clip_low": 'objective = "grpo" or "gspo"'},
     {"loss": {"objective": "grpo"}}),
    ({"loss": {"objective": "dppo", "clip_high": 0.3}}, {"loss.clip_high": 'objective = "grpo" or "gspo" or "cispo"'},
     {"loss": {"objective": "cispo"}}),
    ({"loss": {"objective": "sapo", "dual_clip": 1.1}}, {"loss.dual_clip": 'objective = "grpo" or "gspo" or "dppo"'},
     {"loss": {"objective": "grpo", "dual_clip": 3.0}}),
    ({"loss": {"tau_positive": 1.0, "tau_negative": 1.0}},
     dict.fromkeys(("loss.tau_positive", "loss.tau_negative"), 'objective = "sapo"'), {"loss": {"objective": "sapo"}}),
    ({"loss": {"tv_low": 0.1, "tv_high": 0.1, "log_ratio_penalty": 0.0}},
     dict.fromkeys(("loss.tv_low", "loss.tv_high", "loss.log_ratio_penalty"), 'objective = "dppo"'),
     {"loss": {"objective": "dppo"}}),
    (DECOUPLED | {"loss": {"clip_low": 0.1, "dual_clip": 3.0}},
     dict.fromkeys(("loss.clip_low", "loss.dual_clip"), "updates_per_batch above 1"), {"updates_per_batch": 2}),
    # the correction
    ({"off_policy_correction": {"proximal": "log_linear"}}, {"off_policy_correction.proximal": 'anchor = "proximal"'},
     {"off_policy_correction": {"anchor": "proximal"}}),
    ({"off_policy_correction": {"granularity": "geometric", "max_weight": 2.0, "min_weight": 0.5}},
     dict.fromkeys(("off_policy_correction.granularity", "off_policy_correction.max_weight"), 'weight = "truncate" or "mask"')
     | {"off_policy_correction.min_weight": 'weight = "mask"'},
     {"off_policy_correction": {"weight": "mask"}}),
    ({"off_policy_correction": DECOUPLED["off_policy_correction"] | {"min_weight": 0.5}}, {"off_policy_correction.min_weight": 'weight = "mask"'},
     {"off_policy_correction": {"weight": "mask"}}),
    ({"off_policy_correction": {"stale_token_weight": 0.5}}, {"off_policy_correction.stale_token_weight": "max_token_staleness"},
     {"off_policy_correction": {"max_token_staleness": 0}}),
    ({"off_policy_correction": {"max_token_staleness": 2}, "max_staleness": 2},
     {"off_policy_correction.max_token_staleness": "max_staleness above 2"}, {"max_staleness": 3}),
    (DECOUPLED | {"loss": {"objective": "reinforce"}}, {"off_policy_correction.anchor": "an objective with a ratio"},
     {"loss": {"objective": "cispo"}}),
    ({"off_policy_correction": DECOUPLED["off_policy_correction"] | {"proximal": "log_linear"}, "max_staleness": 0},
     dict.fromkeys(("off_policy_correction.anchor", "off_policy_correction.weight"), "max_staleness above 0"), {"max_staleness": 1}),
    # the KL and the reference
    (FIXED, {"reference.kind": "kl.coef above 0"}, {"kl": {"coef": 0.1}}),
    ({"kl": {"estimator": "k1", "place": "reward", "importance_weighted": True}},
     dict.fromkeys(("kl.estimator", "kl.place", "kl.importance_weighted"), "coef above 0"),
     FIXED | {"kl": {"coef": 0.1, "place": None}}),
    ({"kl": {"schedule": "target", "target": 0.1, "horizon_steps": 5}},
     dict.fromkeys(("kl.schedule", "kl.target", "kl.horizon_steps"), "coef above 0"), FIXED | {"kl": {"coef": 0.1}}),
    ({"kl": {"schedule": "linear", "final_coef": 0.0}},
     dict.fromkeys(("kl.schedule", "kl.final_coef"), "coef above 0"), FIXED | {"kl": {"final_coef": 0.1}}),
    (FIXED | {"kl": {"coef": 0.1, "final_coef": 0.0}}, {"kl.final_coef": 'schedule = "linear"'}, {"kl": {"schedule": "linear"}}),
    (FIXED | {"kl": {"coef": 0.1, "schedule": "linear", "final_coef": 0.1}},
     dict.fromkeys(("kl.schedule", "kl.final_coef"), "a final_coef other than coef"), {"kl": {"final_coef": 0.2}}),
    (FIXED | {"kl": {"coef": 0.1, "target": 0.1, "horizon_steps": 5}},
     dict.fromkeys(("kl.target", "kl.horizon_steps"), 'schedule = "target"'), {"kl": {"schedule": "target"}}),
    (FIXED | {"kl": {"coef": 0.1, "place": "reward", "importance_weighted": True}, "advantage": {"scale": "batch"}},
     {"kl.importance_weighted": 'place = "loss"'}, {"kl": {"place": "loss"}}),
    ({"parity": {"every_steps": 0, "max_time_share": 0.5}}, {"parity.max_time_share": "every_steps"}, {"parity": {"every_steps": 2}}),
    (merged(FIXED, {"kl": {"coef": 0.1}, "reference": {"every_steps": 3, "patience": 2}}),
     {"reference.every_steps": 'kind = "every" or "ema" or "mixture"', "reference.patience": 'kind = "adaptive"'},
     {"reference": {"kind": "every", "patience": None}}),
    (merged(EVERY, {"reference": {"num_snapshots": 2}}), {"reference.num_snapshots": 'kind = "mixture"'},
     {"reference": {"kind": "mixture"}}),
    (merged(EVERY, {"reference": {"alpha": 0.5}}), {"reference.alpha": 'kind = "ema"'}, {"reference": {"kind": "ema"}}),
    (merged(EVERY, {"reference": {"kind": "ema", "alpha": 0.5, "growth": 2.0}}),
     {"reference.growth": 'kind = "every" or "adaptive"'}, {"reference": {"kind": "every", "alpha": None}}),
    (merged(EVERY, {"reference": {"reward_guard": False}}), {"reference.reward_guard": 'kind = "adaptive"'},
     {"reference": {"kind": "adaptive", "kl_threshold": 0.1, "every_steps": None}}),
    ({"reference": {"device": "cpu"}},
     {"reference.device": 'kind = "fixed" or "every" or "ema" or "adaptive" or "mixture"'}, EVERY),
    (merged(EVERY, {"reference": {"max_every_steps": 9}}), {"reference.max_every_steps": "growth"},
     {"reference": {"growth": 2.0}}),
    (merged(EVERY, {"reference": {"growth": 2.0, "max_every_steps": 3}}),
     dict.fromkeys(("reference.growth", "reference.max_every_steps"), "a max_every_steps above every_steps"),
     {"reference": {"max_every_steps": 4}}),
    (merged(ADAPTIVE, {"reference": {"min_every_steps": 3}}), {"reference.min_every_steps": "a value above patience = 3"},
     {"reference": {"patience": 2}}),
    (merged(ADAPTIVE, {"reference": {"min_every_steps": 1, "growth": 2.0, "max_every_steps": 2}}),
     dict.fromkeys(("reference.min_every_steps", "reference.growth", "reference.max_every_steps"),
                   "a value above patience = 3"),
     {"reference": {"max_every_steps": 4}}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "idle", "remedy"), IDLE, ids=lambda value: str(value)[:60])
def test_a_key_that_does_nothing_is_named_and_is_as_if_it_were_not_set(
    settings: Sections, idle: dict[str, str], remedy: Sections, tmp_path: Path
) -> None:
    run = load(tmp_path, merged(ALWAYS, settings))
    assert run.learner.idle_keys() == idle
    note = run.idle_keys_note() or ""
    assert all(f"learner.{key} = " in note and f" (needs {need})" in note for key, need in idle.items()), note
    without = merged(ALWAYS, settings)
    for key in idle:
        *sections, name = key.split(".")
        taken_out: Sections = {name: None}
        for section in sections:
            taken_out = {section: taken_out}
        without = merged(without, taken_out)
    assert run.in_effect() == load(tmp_path, without).in_effect()
    assert not idle.keys() & load(tmp_path, merged(merged(ALWAYS, settings), remedy)).learner.idle_keys().keys()


def test_a_config_without_such_keys_is_in_effect_as_it_is(tmp_path: Path) -> None:
    run = load(tmp_path, merged(ALWAYS, ADAPTIVE))
    assert run.idle_keys_note() is None and run.in_effect() == run


def test_the_line_names_key_value_and_need(tmp_path: Path) -> None:
    run = load(tmp_path, merged(ALWAYS, FIXED | {"loss": {"tv_low": 0.1}}))
    assert run.idle_keys_note() == (
        'these keys have no effect alongside the others: learner.loss.tv_low = 0.1 (needs objective = "dppo"); '
        "learner.reference.kind = 'fixed' (needs kl.coef above 0)"
    )


REFERENCES = [
    {"kind": "fixed", "device": "cpu"},
    {"kind": "every", "every_steps": 2, "growth": 2.0, "max_every_steps": 9, "only": "wte", "reset_optimizer": True},
    {"kind": "ema", "every_steps": 2, "alpha": 0.1},
    {"kind": "mixture", "every_steps": 2, "num_snapshots": 2},
    {"kind": "adaptive", "kl_threshold": 0.1, "patience": 2, "reward_guard": False, "min_every_steps": 4},
]
KLS = [
    {"estimator": "k2"},
    {"estimator": "k1", "importance_weighted": True},
    {"schedule": "linear", "final_coef": 0.0},
    {"schedule": "target", "target": 0.05, "horizon_steps": 5},
    {"place": "reward", "estimator": "k1"},
]


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference["kind"])
@pytest.mark.parametrize("kl", KLS, ids=str)
def test_a_sweep_of_the_kl_from_0_on_runs_and_at_0_there_is_neither_kl_nor_reference(
    reference: Sections, kl: Sections, tmp_path: Path
) -> None:
    settings = {"kl": kl, "reference": reference, "advantage": {"scale": "batch"}}
    for coef in (0.0, 0.01, 0.1):
        run = load(tmp_path, merged(ALWAYS, merged(settings, {"kl": {"coef": coef}})))
        assert (run.in_effect() == run) == (coef > 0)
    off = load(tmp_path, merged(ALWAYS, merged(settings, {"kl": {"coef": 0.0}})))
    assert off.in_effect() == load(tmp_path, merged(ALWAYS, {"advantage": {"scale": "batch"}}))
    assert off.learner.idle_keys().keys() == {"reference.kind", *(f"kl.{key}" for key in kl)}


SWEEPS = {
    "max_staleness": ([0, 1, 8, "auto"], {"weight_sync": {"overlap_with_training": True}, "off_policy_correction": {"max_token_staleness": 1, "stale_token_weight": 0.5}}),
    "updates_per_batch": ([1, 4], DECOUPLED | {"loss": {"clip_low": 0.1}}),
    "dynamic_sampling": ([False, True], {"max_resamples": 3}),
    "lora.rank": ([0, 8], {"lora": {"alpha": 16.0, "target_modules": ["q_proj"]}}),
    "warm_start.steps": ([0, 9], {"warm_start": {"rows_per_step": 8}}),
    "sampling.top_p": ([0.9, 1.0], {"sampling": {"allow_partial_support": True}}),
    "loss.objective": (list(OBJECTIVE_DEFAULTS),
                       {"loss": {"clip_low": 0.1, "clip_high": 0.3, "tau_positive": 2.0, "tv_low": 0.1}}),
    "off_policy_correction.weight": (["none", "mask"], {"off_policy_correction": {"granularity": "geometric", "max_weight": 1.01, "min_weight": 0.9}}),
    "reference.every_steps": ([5, 10, 20], merged(EVERY, {"reference": {"growth": 2.0, "max_every_steps": 20}})),
    "reference.patience": ([1, 9], merged(ADAPTIVE, {"reference": {"min_every_steps": 5}})),
    "curriculum.kind": (["none", "pass_rate"], {"curriculum": {"easy_above": 0.9, "drop_above": 1.0}}),
}  # fmt: skip


@pytest.mark.parametrize("key", SWEEPS)
def test_a_sweep_passes_through_values_that_turn_other_keys_off(key: str, tmp_path: Path) -> None:
    values, settings = SWEEPS[key]
    for value in values:
        change: Sections = {}
        for name in reversed(key.split(".")):
            change = {name: change or value} if change else {name: value}
        load(tmp_path, merged(ALWAYS, merged(settings, change)))


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference["kind"])
@pytest.mark.parametrize("kl", [{"estimator": "k1"}, {"place": "reward"}], ids=str)
def test_what_contradicts_is_refused_once_it_counts(reference: Sections, kl: Sections, tmp_path: Path) -> None:
    settings = merged(ALWAYS, {"kl": kl, "reference": reference})  # k1 in the loss; in the reward with scale = "group"
    load(tmp_path, settings)
    with pytest.raises(ConfigError, match=r'"k1" with place = "loss": .* is zero|advantage\.scale = "group"'):
        load(tmp_path, merged(settings, {"kl": {"coef": 0.1}}))
