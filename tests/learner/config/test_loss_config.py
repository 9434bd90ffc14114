"""Configs of the loss that do nothing or contradict themselves: each is refused with its reason, and its remedy works."""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from learner.config import LearnerRun
from protocol.config import load_config
from protocol.errors import ConfigError

Sections = dict[str, Any]
ALWAYS: Sections = {
    "steps": 1,
    "data": {"task": "reverse"},
    "reward": {"functions": ["exact_match"]},
}
KL = {"reference": {"kind": "fixed"}}

OBJECTIVE = [
    (
        {"objective": "reinforce", "clip_low": 0.2},
        r'clip_low = 0\.2 .*"reinforce", which uses: no bound',
        {"clip_low": None},
    ),
    (
        {"tau_positive": 1.0},
        r'tau_positive = 1\.0 .*"grpo", which uses: clip_low, clip_high, dual',
        {"objective": "sapo"},
    ),
    ({"tau_negative": 1.0}, r'tau_negative = 1\.0 does nothing with objective = "grpo"', {"objective": "sapo"}),
    ({"tv_low": 0.1}, r'tv_low = 0\.1 does nothing with objective = "grpo"', {"objective": "dppo"}),
    ({"tv_high": 0.1}, r'tv_high = 0\.1 does nothing with objective = "grpo"', {"objective": "dppo"}),
    (
        {"log_ratio_penalty": 0.0},
        r'log_ratio_penalty = 0\.0 does nothing with objective = "grpo"',
        {"objective": "dppo"},
    ),
    ({"objective": "cispo", "clip_low": 0.1}, r'clip_low = 0\.1 .*"cispo", which uses: clip_high', {"clip_low": None}),
    ({"objective": "sapo", "dual_clip": 3.0}, r'dual_clip = 3\.0 .*"sapo", which uses: tau_pos', {"objective": "grpo"}),
    ({"objective": "cispo", "clip_high": -1.0}, r"clip_high = -1\.0 must not be negative", {"clip_high": 1.0}),
    ({"objective": "dppo", "tv_low": -0.1}, r"tv_low = -0\.1 must not be negative", {"tv_low": 0.1}),
    ({"clip_low": 0.0}, r"clip_low = 0\.0 must lie between 0 and 1", {"clip_low": 0.1}),
    ({"clip_low": 1.0, "clip_high": 2.0}, r"clip_low = 1\.0 must lie between 0 and 1", {"clip_low": 0.9}),
    ({"clip_low": 0.3}, r"clip_high = 0\.28 must not be below clip_low = 0\.3", {"clip_high": 0.3}),
    (
        {"objective": "gspo", "clip_low": 0.2},
        r"clip_high = 0\.0004 must not be below clip_low = 0\.2",
        {"clip_high": 0.2},
    ),
    ({"dual_clip": 1.1}, r"dual_clip = 1\.1 must be above 1 \+ clip_high = 1\.28", {"dual_clip": 3.0}),
    ({"objective": "sapo", "tau_positive": 0.0}, r"tau_positive must be above 0", {"tau_positive": 1.0}),
    ({"objective": "sapo", "tau_negative": 0.0}, r"tau_negative must be above 0", {"tau_negative": 1.0}),
    ({"entropy_coef": -0.1}, r"entropy_coef = -0\.1 must not be negative", {"entropy_coef": 0.1}),
    (
        {"top_entropy_frac": 0.0},
        r"top_entropy_frac = 0\.0 must lie above 0 and be at most 1",
        {"top_entropy_frac": 0.2},
    ),
    ({"top_entropy_frac": 1.5}, r"top_entropy_frac = 1\.5 must lie above 0", {"top_entropy_frac": 1.0}),
    ({"objective": "ppo"}, r"Invalid enum value 'ppo'", {"objective": "grpo"}),
    ({"normalization": "batch"}, r"Invalid enum value 'batch'", {"normalization": "sequence"}),
]
CORRECTION = [
    ({"proximal": "log_linear"}, r'does nothing with anchor = "behaviour"; set anchor', {"anchor": "proximal"}),
    ({"level": "sequence"}, r"level = 'sequence' does nothing with weight = \"none\"; set weight", {"weight": "mask"}),
    ({"max_weight": 2.0}, r'max_weight = 2\.0 does nothing with weight = "none"; set weight', {"weight": "mask"}),
    ({"min_weight": 0.5}, r'min_weight = 0\.5 does nothing with weight = "none"; set weight', {"weight": "mask"}),
    (
        {"anchor": "proximal", "weight": "truncate", "min_weight": 0.5},
        r'min_weight = 0\.5 does nothing with weight = "truncate"; it belongs to weight = "mask"',
        {"weight": "mask"},
    ),
    (
        {"weight": "mask", "level": "geometric"},
        r'"geometric" needs max_weight: .* 1\.01 is usual',
        {"max_weight": 1.01},
    ),
    ({"weight": "mask", "max_weight": 0.5}, r"max_weight = 0\.5 must be at least 1", {"max_weight": 1.5}),
    ({"weight": "mask", "min_weight": 1.5}, r"min_weight = 1\.5 must lie above 0.* at most 1", {"min_weight": 0.5}),
    ({"weight": "mask", "min_weight": -0.5}, r"min_weight = -0\.5 must lie above 0", {"min_weight": 0.5}),
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
    (
        {"stale_token_weight": 0.5},
        r"stale_token_weight = 0\.5 does nothing without max_token_staleness",
        {"max_token_staleness": 0},
    ),
]
COEFFICIENT = [
    ({"coef": -0.1}, r"coef = -0\.1 must not be negative", {"coef": 0.1}),
    ({"coef": 0.1, "schedule": "linear"}, r'schedule = "linear" needs final_coef', {"final_coef": 0.0}),
    ({"coef": 0.1, "schedule": "target"}, r'schedule = "target" needs target', {"target": 0.1}),
    ({"coef": 0.1, "final_coef": 0.0}, r'final_coef = 0\.0 .* schedule = "constant"; remove it', {"final_coef": None}),
    ({"coef": 0.1, "target": 0.1}, r'target = 0\.1 .* schedule = "constant"; remove it', {"schedule": "target"}),
    (
        {"coef": 0.1, "schedule": "linear", "final_coef": 0.2, "target": 0.1},
        r'target = 0\.1 does nothing with schedule = "linear"',
        {"target": None},
    ),
    (
        {"coef": 0.1, "schedule": "linear", "final_coef": -1.0},
        r"final_coef = -1\.0 must not be negative",
        {"final_coef": 0.0},
    ),
    (
        {"coef": 0.1, "schedule": "linear", "final_coef": 0.1},
        r'final_coef = coef = 0\.1: set schedule = "constant"',
        {"schedule": "constant", "final_coef": None},
    ),
    ({"coef": 0.1, "schedule": "target", "target": 0.0}, r"target = 0\.0 must be above 0", {"target": 0.1}),
    (
        {"coef": 0.0, "schedule": "target", "target": 0.1},
        r"changes coef by a factor, so coef must be above 0",
        {"coef": 0.1},
    ),
    (
        {"coef": 0.1, "schedule": "target", "target": 0.1, "horizon_steps": 0},
        r"horizon_steps = 0 must be at least 1",
        {"horizon_steps": 1},
    ),
    (
        {"coef": 0.1, "horizon_steps": 5},
        r'horizon_steps = 5 does nothing with schedule = "constant"',
        {"horizon_steps": 10},
    ),
    (
        {"coef": 0.1, "place": "reward", "estimator": "k3_grad_k2"},
        r'"k3_grad_k2" differs from "k3" in its gradient only, and a reward has none; set it to "k3"',
        {"estimator": "k3"},
    ),
    (
        {"coef": 0.1, "place": "reward", "importance_weighted": True},
        r"importance_weighted = true does nothing in a reward",
        {"place": "loss"},
    ),
    ({"coef": 0.1, "estimator": "k1"}, r'estimator = "k1" in the loss: .* is zero', {"importance_weighted": True}),
    ({"coef": 0.1, "estimator": "k1"}, r'set importance_weighted = true, place = "reward"', {"place": "reward"}),
    (
        {"coef": 0.1, "estimator": "k2", "importance_weighted": True},
        r'importance_weighted = true with estimator = "k2", whose gradient is right without it',
        {"importance_weighted": False},
    ),
    (
        {"coef": 0.1, "estimator": "k3_grad_k2", "importance_weighted": True},
        r'with estimator = "k3_grad_k2".*set estimator to "k3"',
        {"estimator": "k3"},
    ),
]
SAMPLING = [
    ({"top_p": 0.9}, r"every importance ratio is too small.* or allow_partial_support = true", {"top_p": 1.0}),
    ({"top_p": 0.9}, r"top_p = 0\.9, top_k = 0: .*logprobs", {"allow_partial_support": True}),
    ({"top_k": 50}, r"top_p = 1\.0, top_k = 50: .*Set top_p = 1 and top_k = 0", {"allow_partial_support": True}),
    ({"allow_partial_support": True}, r"does nothing with top_p = 1 and top_k = 0; remove it", {"top_k": 50}),
    ({"top_p": 0.0}, r"top_p = 0\.0 must lie above 0", {"top_p": 1.0}),
    ({"top_k": -1}, r"top_k = -1 must not be negative; 0 samples from all tokens", {"top_k": 0}),
    ({"temperature": 0.0}, r"temperature = 0\.0 must lie between 0\.01", {"temperature": 0.7}),
    ({"temperature": 3.0}, r"temperature = 3\.0 must lie between 0\.01 .* and 2", {"temperature": 2.0}),
    ({"num_completions": 1}, r"num_completions = 1: a group needs at least 2", {"num_completions": 2}),
    ({"max_tokens": 0}, r"max_tokens = 0 must be at least 1", {"max_tokens": 1}),
]
BETWEEN_SECTIONS = [
    (
        {"correction": {"anchor": "proximal"}},
        r'anchor = "proximal" with updates_per_batch = 1 and .*weight = "none": the ratio is always 1',
        {"updates_per_batch": 2},
    ),
    (
        {"correction": {"anchor": "proximal"}},
        r"set correction\.weight, raise updates_per_batch or use the behaviour anchor",
        {"correction": {"weight": "truncate"}},
    ),
    (
        {"correction": {"anchor": "proximal", "weight": "truncate"}, "loss": {"clip_low": 0.1, "dual_clip": 3.0}},
        r"loss\.clip_low = 0\.1, loss\.dual_clip = 3\.0 does nothing with .*updates_per_batch = 1: the ratio is always 1",
        {"updates_per_batch": 2},
    ),
    (
        {"correction": {"anchor": "proximal", "weight": "truncate"}, "loss": {"objective": "reinforce"}},
        r'"proximal" does nothing with loss\.objective = "reinforce", which has no ratio',
        {"correction": {"anchor": "behaviour"}},
    ),
    (
        {"correction": {"anchor": "proximal", "proximal": "log_linear"}, "max_staleness": 0},
        r"max_staleness = 0: without stale tokens it is the behaviour policy",
        {"max_staleness": 1},
    ),
    (
        {"correction": {"weight": "truncate"}},
        r'"truncate" with anchor = "behaviour": the ratio of grpo is the importance weight already, and would count twice',
        {"correction": {"weight": "mask"}},
    ),
    (
        {"correction": {"weight": "truncate"}, "loss": {"objective": "cispo"}},
        r"the ratio of cispo is the importance weight already",
        {"loss": {"objective": "reinforce"}},
    ),
    (
        {"correction": {"max_token_staleness": 2}, "max_staleness": 2},
        r"max_token_staleness = 2 does nothing: no token is more than max_staleness = 2 versions old",
        {"correction": {"max_token_staleness": 1}},
    ),
    ({"kl": {"coef": 0.1}}, r"kl\.coef = 0\.1 needs a reference; set reference\.kind", KL),
    (
        {"reference": {"kind": "fixed"}},
        r'reference\.kind = "fixed" with kl\.coef = 0 costs a forward pass and changes nothing',
        {"kl": {"coef": 0.1}},
    ),
    ({"kl": {"estimator": "k1"}}, r"estimator = 'k1' does nothing with coef = 0", {"kl": {"estimator": "k3"}}),
    ({"kl": {"place": "reward"}}, r"place = 'reward' does nothing with coef = 0", {"kl": {"place": "loss"}}),
    (
        {"kl": {"importance_weighted": True}},
        r"importance_weighted = True does nothing with coef = 0",
        {"kl": {"coef": 0.1}} | KL,
    ),
    (
        {
            "kl": {"coef": 0.1, "place": "reward"},
            "advantage": {"combine": "normalize_then_sum", "scale": "none"},
            "reward": {"functions": ["exact_match", "share_right"]},
        }
        | KL,
        r'place = "reward" with advantage\.combine = "normalize_then_sum": there is no one reward to take the KL off',
        {"advantage": {"combine": "sum"}},
    ),
    (
        {"advantage": {"combine": "normalize_then_sum"}},
        r'"normalize_then_sum" does nothing with 1 reward function',
        {"reward": {"functions": ["exact_match", "share_right"]}},
    ),
    (
        {
            "advantage": {"combine": "normalize_then_sum"},
            "reward": {"functions": ["exact_match", "share_right"], "weights": [1.0, 0.0]},
        },
        r"does nothing with 1 reward function",
        {"reward": {"weights": [1.0, 0.5]}},
    ),
    (
        {"kl": {"coef": 0.1, "place": "reward"}} | KL,
        r'place = "reward" with advantage\.scale = "group": .* cancels kl\.coef; set scale to "batch" or "none"',
        {"advantage": {"scale": "batch"}},
    ),
    (
        {"loss": {"objective": "gspo"}, "correction": {"weight": "mask"}},
        r'weight = "mask" with level = "token" with loss\.objective = "gspo": its ratio is one of the whole completion',
        {"correction": {"level": "sequence"}},
    ),
    (
        {"loss": {"objective": "gspo"}, "correction": {"max_token_staleness": 0}},
        r'max_token_staleness = 0 with loss\.objective = "gspo"',
        {"loss": {"objective": "grpo"}},
    ),
    (
        {"loss": {"objective": "gspo", "top_entropy_frac": 0.5}},
        r'top_entropy_frac = 0\.5 with loss\.objective = "gspo"',
        {"loss": {"objective": "cispo"}},
    ),
    (
        {"reference": {"kind": "adaptive", "kl_threshold": 0.1}, "kl": {"coef": 0.1}, "active_sampling": True},
        r"active_sampling = true with reference\.reward_guard = true: .* never be refreshed",
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
        r"every_steps = 1: where its KL is measured, .* the KL 0; raise every_steps",
        {"reference": {"every_steps": 2}},
    ),
    ({"max_staleness": -1}, r"max_staleness = -1 must not be negative", {"max_staleness": 0}),
    ({"updates_per_batch": 0}, r"updates_per_batch = 0 must be at least 1", {"updates_per_batch": 1}),
]


def within(section: str, cases: list, beside: Sections | None = None) -> list:
    """The same cases as settings of the whole learner."""
    return [({section: bad} | (beside or {}), message, {section: remedy}) for bad, message, remedy in cases]


REFUSED = [
    *within("loss", OBJECTIVE),
    # Without these two, some remedies would be refused by the checks between sections.
    *within("correction", CORRECTION, {"updates_per_batch": 2}),
    *within("kl", COEFFICIENT, KL | {"advantage": {"scale": "batch"}}),
    *within("sampling", SAMPLING),
    *BETWEEN_SECTIONS,
]


def merged(base: Sections, changes: Sections) -> Sections:
    """`base` with `changes`, key by key; a key set to None is taken out."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in result.items() if value is not None}


def load(tmp_path: Path, learner: Sections) -> LearnerRun:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({"model": "tiny:digits", "run_dir": str(tmp_path / "run"), "learner": learner}))
    return load_config(LearnerRun, [str(file)], "learner train")


@pytest.mark.parametrize(("settings", "message", "remedy"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_does_nothing_or_contradicts_is_refused_and_the_remedy_is_taken(
    settings: Sections, message: str, remedy: Sections, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, merged(ALWAYS, settings))
    assert re.search(message, str(refusal.value)) and "learner" in str(refusal.value), refusal.value
    load(tmp_path, merged(merged(ALWAYS, settings), remedy))


def test_a_refusal_names_the_section_it_is_about(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.correction"):
        load(tmp_path, merged(ALWAYS, {"correction": {"sequence_mask": -1.0}}))
    with pytest.raises(ConfigError, match=r"learner\.loss"):
        load(tmp_path, merged(ALWAYS, {"loss": {"clip_low": 0.3}}))
