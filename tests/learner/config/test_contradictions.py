"""Contradictory keys: each combination is rejected with a reason, and the suggested remedy is accepted."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigError
from tests.learner.config.settings import ALWAYS, Sections, load, merged

OUT_OF_RANGE: dict[str, dict[str, Any]] = {
    "must not be negative": {
        "loss.clip_high": -1.0, "loss.entropy_coef": -0.1, "off_policy_correction.sequence_mask": -0.5,
        "off_policy_correction.max_token_staleness": -1, "kl.coef": -0.1, "max_staleness": -1,
        "checkpoint.keep_last": -1, "checkpoint.keep_best": -1, "evaluation.every_steps": -1,
    },
    "must be at least 1": {
        "updates_per_batch": 0, "micro_batch_tokens": 0, "sampling.max_tokens": 0, "data.num_prompts": 0,
    },
    "must be above 0": {"optimizer.learning_rate": 0.0, "reward.timeout_s": 0.0},
    "must be above 0 and at most 1000000": {
        "reward.timeout_s": math.inf, "weight_sync.timeout_s": 1e7, "weight_sync.straggler_timeout_s": math.inf,
        "connect_timeout_s": 1e7, "collective_timeout_s": math.inf, "checkpoint.timeout_s": math.inf,
    },
    "must be at least 0 and at most 1000000": {"reward.unreachable_s": math.inf},
    "must be at least 0 and below 1": {"reward.max_failed_share": 1.0, "optimizer.beta1": -0.5},
    "must be above 0 and at most 1": {"loss.top_entropy_frac": 1.5, "sampling.top_p": 0.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "rule"), [(key, value, rule) for rule, keys in OUT_OF_RANGE.items() for key, value in keys.items()]
)
def test_a_number_out_of_range_is_rejected_with_its_full_key(key: str, value: float, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/run.toml: learner.{key} = {value} {rule}")):
        load(tmp_path, merged(ALWAYS, {key: value}))


ON = {"kl.coef": 0.1, "reference.kind": "fixed"}
IN_REWARD = ON | {"kl.place": "reward", "advantage.scale": "batch"}
ON_SERVER = ON | {"reference.endpoint": "tcp://127.0.0.1:1"}
DISTILLED = ON_SERVER | {"kl.place": "advantage", "reward.functions": []}
ADAPTIVE = {"kl.coef": 0.1, "reference.kind": "adaptive", "reference.kl_threshold": 0.1}
MASK = {"off_policy_correction.weight": "mask"}
AGENT = {"environment.agent": "a:b"}
CURRICULUM = {"curriculum.kind": "pass_rate", "curriculum.reward": "exact_match"}
JUDGE = {"reward.functions": ["judge"], "reward.judge.url": "http://judge/v1"}
SETS = {"evaluation.sets": {"few": {}, "many": {}}, "evaluation.every_steps": 2, "checkpoint.every_steps": 2}
REFUSED: list[tuple[Sections, str, Sections]] = [
    ({"routing_replay": True, "compile": True},
     r"routing_replay = true with compile = true: compiled layers choose their experts themselves", {"compile": "auto"}),
    # tasks and rewards
    ({"data.path": "a.jsonl"}, r"learner\.data\.task = 'reverse', path = 'a\.jsonl' are set; expected exactly one",
     {"data.task": None}),
    ({"data.task": None}, r"learner\.data\.task, path and dataset are unset", {"data.task": "sort"}),
    ({"dynamic_sampling": True, "signal_reward": "right"},
     r"signal_reward = 'right' is not a reward function of this run", {"signal_reward": None}),
    ({"curriculum.kind": "pass_rate", "curriculum.reward": "overlong"},
     r"curriculum\.reward = 'overlong' is not a reward function of this run; use one of: exact_match",
     {"curriculum.reward": "exact_match"}),
    ({"reward.functions": ["exact_match", "mine.py:turn_8", "mine.py:mean"]},
     r"contains a function named 'mean', 'turn_8', but reward/<name> is the run's own metric; rename the function",
     {"reward.functions": ["exact_match", "mine.py:turn_9", "mine.py:my_mean"]}),
    ({"reward.overlong_buffer_tokens": 512},
     r"reward\.overlong_buffer_tokens = 512 must be below sampling\.max_tokens = 512", {"sampling.max_tokens": 513}),
    (JUDGE | {"reward.judge.url": None}, r"judge\.url is not set", JUDGE),
    (JUDGE | {"reward.judge.url": "judge:8000"},
        r"url = 'judge:8000' is not a URL; use one such as http://judge:8000/v1", JUDGE),
    (JUDGE | {"reward.judge.prompt": "Rate it."}, "must contain {completion}",
        {"reward.judge.prompt": "Rate {completion}."}),
    ({"data.chat_template_kwargs.tokenize": True},
     r"chat_template_kwargs contains tokenize, which every call of the template sets itself; remove it",
     {"data.chat_template_kwargs.tokenize": None}),
    ({"data.overlong_prompts": "drop"}, 'overlong_prompts = "drop" needs max_prompt_tokens',
        {"data.max_prompt_tokens": 9}),
    (CURRICULUM | {"curriculum.easy_above": 0.2}, r"hard_below = 0\.25, easy_above = 0\.2",
        {"curriculum.easy_above": 0.5}),
    (CURRICULUM | {"curriculum.easy_weight": 0.001}, r"easy_weight = 0\.001 must be 0, or from 0\.01 to 1",
     {"curriculum.easy_weight": 0.0}),
    (CURRICULUM | {"curriculum.drop_above": 0.7}, r"drop_above = 0\.7 must be above easy_above = 0\.75",
     {"curriculum.drop_above": 0.9}),
    (CURRICULUM | {"curriculum.drop_below": 0.25}, r"drop_below = 0\.25 must .*below hard_below",
        {"curriculum.drop_below": 0.1}),
    # environments and agents
    ({"reward.functions": ["environment_reward"]}, r"environment_reward.*set environment\.factory", AGENT),
    ({"environment.factory": "guess", "reward.overlong_buffer_tokens": 1},
     r"overlong_buffer_tokens = 1 with learner\.environment\.factory = 'guess'",
     {"reward.overlong_buffer_tokens": None}),
    (AGENT | {"environment.factory": "guess"}, "factory and agent are set, but an agent has its own loop",
     {"environment.factory": None}),
    (AGENT | {"environment.tools": ["a:c"]}, "tools and agent are set", {"environment.tools": None}),
    (AGENT | {"environment.command": "x"}, "agent and command are set", {"environment.command": None}),
    ({"environment.agent": "ab"}, "expected module:function", AGENT),
    (AGENT | {"environment.gateway_port": 70000}, "gateway_port = 70000 must be between 0 and 65535",
     {"environment.gateway_port": 7000}),
    (AGENT | {"environment.gateway_host": "0.0.0.0"}, "is not an address that agents can connect to",
     {"environment.gateway_host": "127.0.0.1"}),
    # evaluation
    ({"evaluation.url": "localhost:8000"}, "is not a URL of an OpenAI server",
        {"evaluation.url": "http://localhost:8000/v1"}),
    ({"evaluation.num_samples": 4}, "temperature = 0: all samples of a prompt would be equal",
        {"evaluation.temperature": 1.0}),
    ({"evaluation.path": "a", "evaluation.task": "sort"}, "task = 'sort' and path = 'a' are set",
        {"evaluation.path": None}),
    ({"evaluation.sets": {"hard": {"num_samples": 4}}},
        r"sets\.hard\.num_samples = 4 with temperature = 0: all samples",
     {"evaluation.temperature": 1.0}),
    ({"evaluation.sets": {"Hard one": {}}}, r"sets\.Hard one is not a valid name of a set; use a-z",
        {"evaluation.sets": None}),
    ({"evaluation.every_steps": 2, "evaluation.pin_policy": True, "weight_sync.overlap_with_training": True},
     "cannot wait until an evaluation of the old version is complete", {"evaluation.pin_policy": False}),
    ({"evaluation.every_steps": 20, "checkpoint.every_steps": 50, "checkpoint.best_by": "evaluation"},
     r"would have no evaluation; set evaluation\.every_steps to a divisor of checkpoint\.every_steps",
     {"evaluation.every_steps": 25}),
    (SETS | {"checkpoint.best_by": "evaluation"}, 'use "evaluation/few" or "evaluation/many"',
     {"checkpoint.best_by": "evaluation/few"}),
    (SETS | {"checkpoint.best_by": "luck"}, 'best_by = "luck" is not a known ranking; use "training_reward"',
     {"checkpoint.best_by": "training_reward"}),
    # the objective
    ({"loss.objective": "ppo"}, r"objective = 'ppo' is not a known objective; use grpo, gspo",
        {"loss.objective": "grpo"}),
    ({"loss.clip_low": 0.0}, r"clip_low = 0\.0 must be between 0 and 1", {"loss.clip_low": 0.1}),
    ({"loss.clip_low": 1.0, "loss.clip_high": 2.0}, r"clip_low = 1\.0 must be between 0 and 1", {"loss.clip_low": 0.9}),
    ({"loss.clip_low": 0.3}, r"learner\.loss\.clip_high = 0\.28 must not be below clip_low = 0\.3",
        {"loss.clip_high": 0.3}),
    ({"loss.dual_clip": 1.1}, r"dual_clip = 1\.1 must not be below 1 \+ clip_high = 1\.28", {"loss.dual_clip": 3.0}),
    ({"loss.objective": "dppo", "loss.dual_clip": 1.0}, r"dual_clip = 1\.0 must be above 1; inf sets",
        {"loss.dual_clip": 2}),
    ({"loss.objective": "dppo", "loss.tv_low": 1.0}, r"tv_low = 1\.0 must be between 0 and 1", {"loss.tv_low": 0.1}),
    ({"loss.objective": "sapo", "loss.tau_positive": 0.0}, r"tau_positive = 0.0 must be above 0",
        {"loss.tau_positive": 1.0}),
    ({"loss.objective": "vespo", "loss.decay_positive": math.inf}, r"decay_positive = inf must be finite",
     {"loss.decay_positive": 3.0}),
    ({"loss.objective": "clip_cov", "loss.cov_low": 5.0}, r"cov_low = 5\.0 must be below cov_high",
     {"loss.cov_low": 1.0}),
    ({"loss.objective": "mine.py:f", "loss.parameters": {"clip_low": 0.1}},
     r"parameters contains clip_low, which are keys of learner\.loss", {"loss.parameters": None}),
    ({"loss.entropy_target": 1.0, "loss.entropy_coef": 2.0}, r"entropy_coef = 2\.0 must not be above max_entropy_coef",
     {"loss.max_entropy_coef": 2.0}),
    (ON | {"kl.place": "reward", "advantage.scale": "mean"}, r'kl\.place = "reward" with advantage\.scale = "mean"',
     {"advantage.scale": "none"}),
    ({"reward.overlong_buffer_tokens": 8, "advantage.scale": "mean"},
     r'overlong_buffer_tokens = 8 with advantage\.scale = "mean"', {"advantage.scale": "group"}),
    # the correction
    (MASK | {"off_policy_correction.granularity": "geometric"}, r'"geometric" needs max_weight, .* usually to 1\.01',
     {"off_policy_correction.max_weight": 1.01}),
    ({"off_policy_correction.anchor": "proximal"},
     r'anchor = "proximal" with updates_per_batch = 1 and .*weight = "none": the ratio is always 1.*; '
     r'set off_policy_correction\.weight, raise updates_per_batch, or set off_policy_correction\.anchor = "behavior"',
     {"updates_per_batch": 2}),
    ({"off_policy_correction.weight": "truncate"},
     r'"truncate" with anchor = "behavior": the ratio of grpo already is the importance weight', MASK),
    ({"off_policy_correction.weight": "truncate", "loss.objective": "cispo"},
     r"the ratio of cispo already is the importance weight", {"loss.objective": "reinforce"}),
    ({"off_policy_correction.weight": "truncate", "loss.objective": "vespo"},
     r'set weight = "none", or weight = "mask" with granularity = "sequence"',
     {"off_policy_correction.weight": "none"}),
    ({"off_policy_correction.weight": "truncate", "loss.objective": "gspo"},
     r'set anchor = "proximal", or weight = "mask" with granularity = "sequence"',
     MASK | {"off_policy_correction.granularity": "sequence"}),
    (MASK | {"loss.objective": "gspo"},
     r'weight = "mask" with granularity = "token" with loss\.objective = "gspo": its ratio covers the whole completion',
     {"off_policy_correction.granularity": "sequence"}),
    ({"loss.objective": "vespo", "off_policy_correction.max_binary_kl": 0.1},
     r'max_binary_kl = 0\.1 with loss\.objective = "vespo": its ratio covers the whole completion',
     {"loss.objective": "cispo"}),
    ({"loss.objective": "vespo", "off_policy_correction.anchor": "proximal", "updates_per_batch": 2},
     r"vespo weighs a completion by its whole ratio", {"off_policy_correction.anchor": "behavior"}),
    ({"loss.objective": "gspo", "loss.top_entropy_frac": 0.5}, r'top_entropy_frac = 0\.5 with loss\.objective = "gspo"',
     {"loss.objective": "cispo"}),
    # the KL and its reference
    ({"kl.coef": 0.1}, r"learner\.kl\.coef = 0\.1 needs a reference; set reference\.kind", ON),
    (ON | {"kl.schedule": "linear"}, r'schedule = "linear" needs final_coef', {"kl.final_coef": 0.0}),
    (ON | {"kl.schedule": "target"}, r'schedule = "target" needs target', {"kl.target": 0.1}),
    (ON | {"kl.estimator": "k1"},
     r'estimator = "k1" with place = "loss": .* is zero; set importance_weighted = true, place = "reward"',
     {"kl.importance_weighted": True}),
    (ON | {"kl.estimator": "k2", "kl.importance_weighted": True},
     r'importance_weighted = true with estimator = "k2": the gradient .* correct only without.*set estimator to "k3"',
     {"kl.estimator": "k3"}),
    (IN_REWARD | {"kl.estimator": "k2"},
     r'"k2" with place = "reward" moves .* away.*set estimator = "k1", or place = "loss"', {"kl.place": "loss"}),
    (IN_REWARD | {"advantage.combine": "normalize_then_sum", "reward.functions": ["exact_match", "share_right"]},
     r'place = "reward" with advantage\.combine = "normalize_then_sum": the KL cannot be subtracted from several '
     r'rewards',
     {"advantage.combine": "sum"}),
    (AGENT | {"advantage.credit": "gigpo", "advantage.combine": "normalize_then_sum",
        "reward.functions": ["environment_reward", "share_right"]},
     r'credit = "gigpo" with advantage\.combine = "normalize_then_sum": the rewards of turns belong to one function',
     {"advantage.combine": "sum"}),
    (AGENT | {"advantage.credit": "turn", "advantage.scale": "mean"},
     r'credit = "turn" with advantage\.scale = "mean": .*; set scale to "group", "batch" or "none", or credit',
     {"advantage.scale": "none"}),
    (AGENT | {"advantage.credit": "gigpo", "advantage.scale": "mean"},
     r'credit = "gigpo" with advantage\.scale = "mean"', {"advantage.credit": "episode"}),
    (AGENT | {"advantage.credit": "turn", "loss.objective": "gspo"},
     r'credit = "turn" with loss\.objective = "gspo": its ratio covers the whole completion.*; choose another objective',
     {"loss.objective": "cispo"}),
    (AGENT | {"advantage.credit": "turn", "advantage.gamma": 1.5}, r"gamma = 1\.5 must be above 0 and at most 1",
     {"advantage.gamma": 1.0}),
    (AGENT | {"advantage.credit": "gigpo", "advantage.step_weight": -1.0}, r"step_weight = -1\.0 must be at least 0",
     {"advantage.step_weight": 0.0}),
    (IN_REWARD | {"advantage.scale": "group"},
     r'place = "reward" with advantage\.scale = "group": .* cancels kl\.coef; set scale to "batch" or "none"',
     {"advantage.scale": "batch"}),
    ({"kl.coef": 0.1, "reference.kind": "ema", "reference.every_steps": 2, "reference.alpha": 0.1, "lora.rank": 4},
     r'reference\.kind = "ema" with lora\.rank = 4: an adapter is the product of A and B',
     {"reference.kind": "every", "reference.alpha": None}),
    (ADAPTIVE | {"dynamic_sampling": True},
     r"dynamic_sampling = true with reference\.reward_guard = true: .* never be refreshed",
     {"reference.reward_guard": False}),
    (ADAPTIVE | {"curriculum.kind": "pass_rate"}, r'curriculum\.kind = "pass_rate" with reference\.reward_guard = true',
     {"reference.reward_guard": False}),
    (IN_REWARD | {"reference.kind": "every", "reference.every_steps": 1, "updates_per_batch": 2},
     r"every_steps = 1: the KL is measured .* the KL is 0; raise every_steps", {"reference.every_steps": 2}),
    # a reference on a server, and distillation
    (ON_SERVER | {"reference.kind": "ema", "reference.every_steps": 2, "reference.alpha": 0.1},
     r'endpoint = "tcp://127.0.0.1:1" with kind = "ema": a server holds one copy', {"reference.endpoint": None}),
    (ON_SERVER | {"reference.kind": "every", "reference.every_steps": 2, "reference.only": "mlp"},
     r"with only = 'mlp': a weight sync sends the whole policy", {"reference.only": None}),
    (ON_SERVER | {"sampling.temperature": 0.7}, r"temperature = 0\.7: a server scores at temperature 1",
     {"sampling.temperature": 1.0}),
    (ON_SERVER | {"reference.endpoint": "tcp://127.0.0.1:5757"}, r"5757\" is a server of the run",
     {"reference.endpoint": "tcp://127.0.0.1:5758"}),
    (DISTILLED | {"kl.place": "loss"}, r"reward\.functions = \[\] leaves nothing to learn from; .* distill",
     {"kl.place": "advantage"}),
    ({"reward.only_logged": True}, r"reward\.only_logged = true leaves nothing to learn from",
     DISTILLED | {"reward.functions": ["exact_match"]}),
    (DISTILLED | {"kl.estimator": "k3"}, r'"k3" with place = "advantage" moves', {"kl.estimator": None}),
    (DISTILLED | {"evaluation.every_steps": 2}, r"evaluation\.every_steps = 2 needs a reward function; .*only_logged",
     {"reward.functions": ["exact_match"], "reward.only_logged": True}),
    (DISTILLED | {"dynamic_sampling": True}, r"dynamic_sampling = true with kl\.place = \"advantage\"",
     {"dynamic_sampling": False}),
    (DISTILLED | {"off_policy_correction.sequence_mask": 0.1}, r"sequence_mask = 0\.1 with kl\.place",
     {"off_policy_correction.sequence_mask": None}),
    (DISTILLED | {"loss.objective": "gspo"}, r'place = "advantage" with loss\.objective = "gspo", .* each token',
     {"loss.objective": "grpo"}),
    (DISTILLED | {"loss.objective": "kl_cov"}, r'place = "advantage" with loss\.objective = "kl_cov"',
     {"loss.objective": "dppo"}),
    (DISTILLED | {"off_policy_correction.weight": "mask", "off_policy_correction.weighted_completions": "negative"},
     r'weighted_completions = "negative" with kl\.place', {"off_policy_correction.weighted_completions": "all"}),
    # evaluation
    ({"evaluation.sets": {"a": {"split": "test"}}}, r"evaluation\.sets\.a has .*'split': 'test'.* of no dataset",
     {"evaluation.sets": {"a": {"split": "test", "dataset": "d"}}}),
    # sampling
    ({"sampling.top_p": 0.9}, r"top_p = 0\.9, top_k = 0: .*every importance ratio would be too small",
     {"sampling.allow_partial_support": True}),
    ({"sampling.top_k": 50}, r"top_k = 50: .*Set top_p = 1 and top_k = 0, or allow_partial_support = true",
        {"sampling.top_k": 0}),
    ({"sampling.top_k": -1}, r"top_k = -1 must not be negative; 0 samples from all tokens", {"sampling.top_k": 0}),
    ({"sampling.temperature": 0.0}, r"temperature = 0\.0 must be between 0\.01", {"sampling.temperature": 0.01}),
    ({"sampling.temperature": 3.0}, r"temperature = 3\.0 must be between 0\.01 .* and 2",
        {"sampling.temperature": 2.0}),
    ({"sampling.group_size": 1}, r"group_size = 1 must be at least 2", {"sampling.group_size": 2}),
    ({"sampling.stop": ["</a>", ""]}, r"stop = \('</a>', ''\) must be at most 16 texts of 1 to 256 characters",
     {"sampling.stop": ["</a>"]}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message", "remedy"), REFUSED, ids=lambda value: str(value)[:60])
def test_contradictory_keys_are_rejected_and_the_remedy_is_accepted(
    settings: Sections, message: str, remedy: Sections, tmp_path: Path
) -> None:
    refused = merged(ALWAYS, settings)
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, refused)
    assert re.search(message, str(refusal.value)), refusal.value
    load(tmp_path, merged(refused, remedy))
