"""The part of a run's config that a model card may show.

    config.toml ─▶ keys in PUBLIC that are not at their default ─▶ without places ─▶ the card

Invariant: a key is shown only if PUBLIC names it or its section. Addresses, keys, commands and directories of a
machine are never shown; a new section stays private until it is listed.
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

PUBLIC = (
    "model", "dtype", "head_dtype", "seed",
    *(f"learner.{key}" for key in (
        "advantage", "curriculum", "data", "dynamic_sampling", "groups_per_step", "kl", "loss", "lora", "max_resamples",
        "max_staleness", "off_policy_correction", "optimizer", "reference", "sampling", "signal_reward", "steps",
        "updates_per_batch", "warm_start",
        "environment.factory", "environment.max_episode_tokens", "environment.max_turns", "environment.tools",
        "evaluation.dataset", "evaluation.dataset_config", "evaluation.max_tokens", "evaluation.num_prompts",
        "evaluation.num_samples",
        "evaluation.path", "evaluation.sets", "evaluation.split", "evaluation.task", "evaluation.temperature",
        "reward.functions", "reward.on_none", "reward.overlong_buffer_tokens", "reward.overlong_penalty",
        "reward.skip_special_tokens", "reward.weights",
    )),
)  # fmt: skip
"""Keys, and sections with all their keys."""
FREE_TEXTS = ("learner.data.chat_template_kwargs", "learner.data.system_prompt", "learner.sampling.stop")
"""Public keys whose texts name no file, whatever they look like."""


def public_config(run: LearnerRun) -> dict[str, Any]:
    """Return the public keys that are not at their default, by full name."""
    defaults = {name: field.default for name, field in keys_of(LearnerRun).items()}
    values = flatten(to_builtins(run.in_effect()))
    return {
        key: value if _is_among(FREE_TEXTS, key) else without_places(value)
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


def without_places(value: Any) -> Any:
    """Return a value in which no text names a place on a machine, and no URL holds a password or a query."""
    if isinstance(value, dict):
        return {key: without_places(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(one) for one in value]
    if not isinstance(value, str):
        return value
    if "://" in value:
        url = urlsplit(value)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    return Path(value).name if value.startswith(("/", "~", "../")) else value


def hub_name(model: str) -> str | None:
    """Return the name of a model on the hub, or None for a directory or a built-in model."""
    is_place = model.startswith(("/", "~", ".")) or model.count("/") > 1 or Path(model).is_dir()
    return None if is_builtin(model) or is_place else model


def _is_among(names: Iterable[str], key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _plain(default: Any) -> Any:
    return None if default is NODEFAULT else to_builtins(default)
