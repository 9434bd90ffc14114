"""The part of a run's config that a model card may show.

    config.toml ─▶ keys in PUBLIC that are not at their default ─▶ without paths ─▶ the card

Invariant: a key is shown only if PUBLIC names it. Addresses, keys, commands and directories of a machine are never
shown; a new key stays private until it is listed. Where the run needs a key that is left out, the card says so.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import NODEFAULT, to_builtins

from learner.config import LearnerRun
from protocol.builtin_models import is_builtin
from protocol.config_keys import flatten, keys_of

PUBLIC_KEYS = {
    "": "model dtype head_dtype seed",
    "server": "dtype quantization kv_cache_dtype max_model_len",
    "learner": "steps groups_per_step max_staleness max_auto_staleness updates_per_batch routing_replay "
    "dynamic_sampling signal_reward max_resamples",
    "learner.data": "task path dataset revision dataset_config split num_prompts num_digits prompt_column "
    "system_prompt chat_template_kwargs max_prompt_tokens overlong_prompts num_workers shuffle",
    "learner.reward": "functions weights only_logged on_none skip_special_tokens overlong_buffer_tokens "
    "overlong_penalty",
    "learner.lora": "rank alpha target_modules",
    "learner.warm_start": "steps learning_rate rows_per_step answer_column",
    "learner.curriculum": "kind reward easy_above hard_below easy_weight hard_weight drop_above drop_below decay",
    "learner.sampling": "group_size max_tokens temperature top_p top_k stop allow_partial_support seeded",
    "learner.environment": "factory tools agent tool_call_format override_sampling max_turns max_episode_tokens",
    "learner.advantage": "baseline scale combine credit gamma step_weight function",
    "learner.loss": "objective normalization clip_low clip_high dual_clip tau_positive tau_negative tv_low tv_high "
    "log_ratio_penalty power_positive decay_positive power_negative decay_negative cov_frac cov_low cov_high "
    "cov_penalty parameters mask_truncated entropy_coef entropy_target entropy_coef_step max_entropy_coef "
    "top_entropy_frac",
    "learner.off_policy_correction": "anchor proximal weight granularity max_weight min_weight weighted_completions "
    "max_binary_kl sequence_mask max_token_staleness stale_token_weight",
    "learner.kl": "coef estimator place schedule final_coef target horizon_steps importance_weighted",
    "learner.reference": "kind every_steps growth max_every_steps alpha kl_threshold patience reward_guard "
    "min_every_steps num_snapshots only reset_optimizer",
    "learner.optimizer": "kind offload learning_rate schedule warmup_steps beta1 beta2 weight_decay max_grad_norm "
    "max_skipped_updates",
    "learner.evaluation": "task path dataset dataset_config split num_prompts num_samples temperature max_tokens sets",
}
"""Public keys by section. A section with names of the user's own is one key."""
PUBLIC = tuple(f"{section}.{key}".lstrip(".") for section, keys in PUBLIC_KEYS.items() for key in keys.split())
FREE_TEXTS = ("learner.data.chat_template_kwargs", "learner.data.system_prompt", "learner.sampling.stop")
"""Public keys whose texts name no file, whatever they look like."""


def public_config(run: LearnerRun) -> dict[str, Any]:
    """Return the public keys that are not at their default, by full name."""
    defaults = {name: field.default for name, field in keys_of(LearnerRun).items()}
    values = flatten(to_builtins(run.in_effect()))
    return {
        key: value if _is_among(FREE_TEXTS, key) else without_paths(value)
        for key, value in sorted(values.items())
        if _is_among(PUBLIC, key) and value is not None and value != _plain(defaults.get(key, NODEFAULT))
    }


def as_toml(config: Mapping[str, Any]) -> str:
    """Return keys by full name as a config file."""
    tables: dict[str, Any] = {}
    for key, value in config.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return msgspec.toml.encode(tables).decode().strip()


def without_paths(value: Any) -> Any:
    """Return a value in which no text names a path of a machine, and no URL holds a password or a query."""
    if isinstance(value, dict):
        return {key: without_paths(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(one) for one in value]
    if not isinstance(value, str):
        return value
    if "://" in value:
        url = urlsplit(value)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    return Path(value).name if value.startswith(("/", "~", "../")) else value


def hub_name(name: str, run_dir: Path) -> str | None:
    """Return the name of a model or dataset on the hub, or None for a directory or a built-in model.

    The directory in which the run was started is unknown here, but is often one of those that contain `run_dir`.
    """
    is_path = name.startswith(("/", "~", ".")) or name.count("/") > 1
    starts = (Path(), *run_dir.absolute().parents)
    return None if is_builtin(name) or is_path or any((start / name).is_dir() for start in starts) else name


def _is_among(names: Iterable[str], key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _plain(default: Any) -> Any:
    return None if default is NODEFAULT else to_builtins(default)
