"""Configs of the loss that contradict themselves: each is refused with its reason, and its remedy works."""

import re
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.learner.config.settings import ALWAYS, Sections, load, merged

KL = {"reference": {"kind": "fixed"}}

OBJECTIVE = [
    ({"objective": "cispo", "clip_high": -1.0}, r"clip_high = -1\.0 must not be negative", {"clip_high": 1.0}),
    ({"objective": "dppo", "tv_low": -0.1}, r"tv_low = -0\.1 must not be negative", {"tv_low": 0.1}),
    ({"clip_low": 0.0}, r"clip_low = 0\.0 must be between 0 and 1", {"clip_low": 0.1}),
    ({"clip_low": 1.0, "clip_high": 2.0}, r"clip_low = 1\.0 must be between 0 and 1", {"clip_low": 0.9}),
    ({"clip_low": 0.3}, r"clip_high = 0\.28 must not be below clip_low = 0\.3", {"clip_high": 0.3}),
    (
        {"objective": "gspo", "clip_low": 0.2},
        r"clip_high = 0\.0004 must not be below clip_low = 0\.2",
        {"clip_high": 0.2},
    ),
    ({"dual_clip": 1.1}, r"dual_clip = 1\.1 must be above 1 \+ clip_high = 1\.28", {"dual_clip": 3.0}),
    ({"objective": "sapo", "tau_positive": 0.0}, r"tau_positive = 0.0 must be above 0", {"tau_positive": 1.0}),
    ({"objective": "sapo", "tau_negative": 0.0}, r"tau_negative = 0.0 must be above 0", {"tau_negative": 1.0}),
    ({"entropy_coef": -0.1}, r"entropy_coef = -0\.1 must not be negative", {"entropy_coef": 0.1}),
    (
        {"top_entropy_frac": 0.0},
        r"top_entropy_frac = 0\.0 must be above 0 and at most 1",
        {"top_entropy_frac": 0.2},
    ),
    ({"top_entropy_frac": 1.5}, r"top_entropy_frac = 1\.5 must be above 0", {"top_entropy_frac": 1.0}),
    ({"objective": "ppo"}, r"objective = 'ppo' is not a known objective; use grpo, gspo", {"objective": "grpo"}),
    ({"normalization": "batch"}, r"Invalid enum value 'batch'", {"normalization": "sequence"}),
]
CORRECTION = [
    (
        {"weight": "mask", "granularity": "geometric"},
        r'"geometric" needs max_weight, .* usually to 1\.01',
        {"max_weight": 1.01},
    ),
    ({"weight": "mask", "max_weight": 0.5}, r"max_weight = 0\.5 must be at least 1", {"max_weight": 1.5}),
    ({"weight": "mask", "min_weight": 1.5}, r"min_weight = 1\.5 must be above 0.* at most 1", {"min_weight": 0.5}),
    ({"weight": "mask", "min_weight": -0.5}, r"min_weight = -0\.5 must be above 0", {"min_weight": 0.5}),
    ({"sequence_mask": -0.5}, r"sequence_mask = -0\.5 must not be negative", {"sequence_mask": 0.0}),
    ({"max_token_staleness": -1}, r"max_token_staleness = -1 must not be negative", {"max_token_staleness": 0}),
    (
        {"max_token_staleness": 0, "stale_token_weight": 1.0},
        r"stale_token_weight = 1\.0 must be at least 0 and below 1",
        {"stale_token_weight": 0.5},
    ),
    (
        {"max_token_staleness": 0, "stale_token_weight": -0.5},
        r"stale_token_weight = -0\.5 must be at least 0 and below 1",
        {"stale_token_weight": 0.5},
    ),
]
COEFFICIENT = [
    ({"coef": -0.1}, r"coef = -0\.1 must not be negative", {"coef": 0.1}),
    ({"coef": 0.1, "schedule": "linear"}, r'schedule = "linear" needs final_coef', {"final_coef": 0.0}),
    ({"coef": 0.1, "schedule": "target"}, r'schedule = "target" needs target', {"target": 0.1}),
    (
        {"coef": 0.1, "schedule": "linear", "final_coef": -1.0},
        r"final_coef = -1\.0 must not be negative",
        {"final_coef": 0.0},
    ),
    ({"coef": 0.1, "schedule": "target", "target": 0.0}, r"target = 0\.0 must be above 0", {"target": 0.1}),
    (
        {"coef": 0.1, "schedule": "target", "target": 0.1, "horizon_steps": 0},
        r"horizon_steps = 0 must be at least 1",
        {"horizon_steps": 1},
    ),
    (
        {"coef": 0.1, "estimator": "k1"},
        r'estimator = "k1" with place = "loss": .* is zero',
        {"importance_weighted": True},
    ),
    ({"coef": 0.1, "estimator": "k1"}, r'set importance_weighted = true, place = "reward"', {"place": "reward"}),
    (
        {"coef": 0.1, "estimator": "k2", "importance_weighted": True},
        r'importance_weighted = true with estimator = "k2": the gradient .* correct only without',
        {"importance_weighted": False},
    ),
    (
        {"coef": 0.1, "estimator": "k3_grad_k2", "importance_weighted": True},
        r'with estimator = "k3_grad_k2".*set estimator to "k3"',
        {"estimator": "k3"},
    ),
    (
        {"coef": 0.1, "place": "reward", "estimator": "k2"},
        r'"k2" with place = "reward" moves .* away',
        {"place": "loss"},
    ),
    (
        {"coef": 0.1, "place": "reward", "estimator": "k3"},
        r'set estimator = "k1", or place = "loss"',
        {"estimator": "k1"},
    ),
    (
        {"coef": 0.1, "place": "reward", "estimator": "k3_grad_k2"},
        r'estimator = "k3_grad_k2" with place = "reward"',
        {"estimator": None},
    ),
]
SAMPLING = [
    ({"top_p": 0.9}, r"every importance ratio would be too small.* or allow_partial_support = true", {"top_p": 1.0}),
    ({"top_p": 0.9}, r"top_p = 0\.9, top_k = 0: .*logprobs", {"allow_partial_support": True}),
    ({"top_k": 50}, r"top_p = 1\.0, top_k = 50: .*Set top_p = 1 and top_k = 0", {"allow_partial_support": True}),
    ({"top_p": 0.0}, r"top_p = 0\.0 must be above 0", {"top_p": 1.0}),
    ({"top_k": -1}, r"top_k = -1 must not be negative; 0 samples from all tokens", {"top_k": 0}),
    ({"temperature": 0.0}, r"temperature = 0\.0 must be between 0\.01", {"temperature": 0.7}),
    ({"temperature": 3.0}, r"temperature = 3\.0 must be between 0\.01 .* and 2", {"temperature": 2.0}),
    ({"group_size": 1}, r"group_size = 1 must be at least 2", {"group_size": 2}),
    ({"max_tokens": 0}, r"max_tokens = 0 must be at least 1", {"max_tokens": 1}),
]
BETWEEN_SECTIONS = [
    (
        {"off_policy_correction": {"anchor": "proximal"}},
        r'anchor = "proximal" with updates_per_batch = 1 and .*weight = "none": the ratio is always 1',
        {"updates_per_batch": 2},
    ),
    (
        {"off_policy_correction": {"anchor": "proximal"}},
        r'set off_policy_correction\.weight, raise updates_per_batch, or set off_policy_correction\.anchor = "behaviour"',
        {"off_policy_correction": {"weight": "truncate"}},
    ),
    (
        {"off_policy_correction": {"weight": "truncate"}},
        r'"truncate" with anchor = "behaviour": the ratio of grpo already is the importance weight, which would count twice',
        {"off_policy_correction": {"weight": "mask"}},
    ),
    (
        {"off_policy_correction": {"weight": "truncate"}, "loss": {"objective": "cispo"}},
        r"the ratio of cispo already is the importance weight",
        {"loss": {"objective": "reinforce"}},
    ),
    ({"kl": {"coef": 0.1}}, r"kl\.coef = 0\.1 needs a reference; set reference\.kind", KL),
    (
        {
            "kl": {"coef": 0.1, "place": "reward"},
            "advantage": {"combine": "normalize_then_sum", "scale": "none"},
            "reward": {"functions": ["exact_match", "share_right"]},
        }
        | KL,
        r'place = "reward" with advantage\.combine = "normalize_then_sum": the KL cannot be subtracted from several rewards',
        {"advantage": {"combine": "sum"}},
    ),
    (
        {"kl": {"coef": 0.1, "place": "reward"}} | KL,
        r'place = "reward" with advantage\.scale = "group": .* cancels kl\.coef; set scale to "batch" or "none"',
        {"advantage": {"scale": "batch"}},
    ),
    (
        {"loss": {"objective": "gspo"}, "off_policy_correction": {"weight": "mask"}},
        r'weight = "mask" with granularity = "token" with loss\.objective = "gspo": its ratio covers the whole completion',
        {"off_policy_correction": {"granularity": "sequence"}},
    ),
    (
        {"loss": {"objective": "gspo"}, "off_policy_correction": {"max_token_staleness": 0}},
        r'max_token_staleness = 0 with loss\.objective = "gspo"',
        {"loss": {"objective": "grpo"}},
    ),
    (
        {"loss": {"objective": "gspo", "top_entropy_frac": 0.5}},
        r'top_entropy_frac = 0\.5 with loss\.objective = "gspo"',
        {"loss": {"objective": "cispo"}},
    ),
    (
        {"reference": {"kind": "ema", "every_steps": 2, "alpha": 0.1}, "kl": {"coef": 0.1}, "lora": {"rank": 4}},
        r'reference\.kind = "ema" with lora\.rank = 4: an adapter is the product of A and B',
        {"reference": {"kind": "every", "alpha": None}},
    ),
    (
        {"dynamic_sampling": True, "signal_reward": "right"},
        r"signal_reward = 'right' is not a reward function of this run",
        {"signal_reward": None},
    ),
    (
        {"reference": {"kind": "adaptive", "kl_threshold": 0.1}, "kl": {"coef": 0.1}, "dynamic_sampling": True},
        r"dynamic_sampling = true with reference\.reward_guard = true: .* never be refreshed",
        {"reference": {"reward_guard": False}},
    ),
    (
        {
            "reference": {"kind": "adaptive", "kl_threshold": 0.1},
            "kl": {"coef": 0.1},
            "curriculum": {"kind": "pass_rate"},
        },
        r'curriculum\.kind = "pass_rate" with reference\.reward_guard = true',
        {"reference": {"reward_guard": False}},
    ),
    (
        {
            "reference": {"kind": "every", "every_steps": 1},
            "kl": {"coef": 0.1, "place": "reward"},
            "updates_per_batch": 2,
            "advantage": {"scale": "none"},
        },
        r"every_steps = 1: the KL is measured .* the KL is 0; raise every_steps",
        {"reference": {"every_steps": 2}},
    ),
    ({"max_staleness": -1}, r"max_staleness = -1 must not be negative", {"max_staleness": 0}),
    (
        {"max_staleness": "auto", "max_auto_staleness": 0},
        r"max_auto_staleness = 0 must be at least 1",
        {"max_auto_staleness": 1},
    ),
    ({"micro_batch_tokens": 0}, r"micro_batch_tokens = 0 must be at least 1", {"micro_batch_tokens": "auto"}),
    ({"updates_per_batch": 0}, r"updates_per_batch = 0 must be at least 1", {"updates_per_batch": 1}),
]


def within(section: str, cases: list, beside: Sections | None = None) -> list:
    """The same cases as settings of the whole learner."""
    return [({section: bad} | (beside or {}), message, {section: remedy}) for bad, message, remedy in cases]


REFUSED = [
    *within("loss", OBJECTIVE),
    # Without these two, some remedies would be refused by the checks between sections.
    *within("off_policy_correction", CORRECTION, {"updates_per_batch": 2}),
    *within("kl", COEFFICIENT, KL | {"advantage": {"scale": "batch"}}),
    *within("sampling", SAMPLING),
    *BETWEEN_SECTIONS,
]


@pytest.mark.parametrize(("settings", "message", "remedy"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_contradicts_is_refused_and_the_remedy_is_taken(
    settings: Sections, message: str, remedy: Sections, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, merged(ALWAYS, settings))
    assert re.search(message, str(refusal.value)), refusal.value
    load(tmp_path, merged(merged(ALWAYS, settings), remedy))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"off_policy_correction": {"sequence_mask": -1.0}},
            "learner.off_policy_correction.sequence_mask = -1.0 must not be negative",
        ),
        ({"loss": {"clip_low": 0.3}}, "learner.loss.clip_high = 0.28 must not be below clip_low"),
        ({"kl": {"coef": 0.1}}, "learner.kl.coef = 0.1 needs a reference"),
        ({"data": {"num_prompts": 0}}, "learner.data.num_prompts = 0 must be at least 1"),
        (
            {"data": {"path": "a.jsonl"}},
            "learner.data.task = 'reverse', path = 'a.jsonl' are set; expected exactly one",
        ),
        ({"data": {"task": None}}, "learner.data.task, path and dataset are unset"),
        ({"reward": {"timeout_s": 0.0}}, "learner.reward.timeout_s = 0.0 must be above 0"),
    ],
)
def test_a_refusal_names_the_whole_key(settings: Sections, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/run.toml: {re.escape(message)}"):
        load(tmp_path, merged(ALWAYS, settings))
