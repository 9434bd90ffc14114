"""Former names of config keys and metrics, which config files, flags and the files of old runs may still use.

    raw TOML ──▶ renamed ──▶ raw TOML with today's keys        flags ──▶ renamed_flags ──▶ flags

Invariant: behind this module, every key has today's name. A name is removed from the table one release after
its change.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protocol.errors import ConfigError

KEYS = {
    "learner.push": "learner.weight_sync",
    "learner.push.overlap": "learner.weight_sync.overlap_with_training",
    "learner.push.patience_s": "learner.weight_sync.straggler_timeout_s",
    "learner.push.wire": "learner.weight_sync.compression",
    "learner.active_sampling": "learner.dynamic_sampling",
    "learner.max_replacements": "learner.max_resamples",
    "learner.sampling.num_completions": "learner.sampling.group_size",
    "learner.correction": "learner.off_policy_correction",
    "learner.correction.level": "learner.off_policy_correction.granularity",
    "learner.group_deadline_s": "learner.group_idle_timeout_s",
    "learner.rank_timeout_s": "learner.collective_timeout_s",
    "learner.data.too_long": "learner.data.overlong_prompts",
    "learner.evaluation.pin": "learner.evaluation.pin_policy",
    "learner.environment.renderer": "learner.environment.tool_call_format",
    "server.receive_overlap": "server.overlap_weight_loading",
    "server.kv_on_push": "server.kv_cache_on_weight_sync",
    "learner.checkpoint_every": "learner.checkpoint.every_steps",
    "learner.keep_last": "learner.checkpoint.keep_last",
    "learner.keep_best": "learner.checkpoint.keep_best",
    "learner.export_model": "learner.checkpoint.export_model",
    "learner.trackers": "learner.report.trackers",
    "learner.dashboard_port": "learner.report.dashboard_port",
    "learner.parity.max_abs_logprob": "learner.parity.max_mean_abs_logprob",
    "deploy.sharded": "learner.sharding",
}
"""Former name → name. The name of a section applies to its keys."""
VALUES = {
    "learner.weight_sync.compression": {"dense": "none"},
    "learner.weight_sync.transport": {"gloo": "tcp"},
    "learner.data.overlong_prompts": {"refuse": "error"},
    "learner.sharding": {"true": "full", "false": "none"},
    "learner.off_policy_correction.anchor": {"behaviour": "behavior"},
}
"""Key → former value → value. Booleans are spelled as in TOML."""
METRICS = {
    "push/": "weight_sync/",
    "wait/push": "bottleneck/weight_sync",
    "wait/": "bottleneck/",
    "time/push": "time/weight_sync",
    "policy/behaviour_kl": "policy/behavior_kl",
}
"""Beginning of a metric's former name → beginning of its name. The first that fits counts."""

Path = tuple[str, ...]


def renamed(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a config with today's keys and values, and what it has by a former name, with today's.

    Raises:
        ConfigError: A key is set under both names.
    """
    config: dict[str, Any] = {}
    former: dict[str, str] = {}
    set_as: dict[Path, Path] = {}
    for path, value in _leaves(raw):
        name = _current(path)
        if value == {} and isinstance(value, dict):
            _section(config, name)
            continue
        if name in set_as:
            old = ".".join(path if path != name else set_as[name])
            raise ConfigError(f"{old} is the former name of {'.'.join(name)}, and the config has both; remove {old}")
        set_as[name] = path
        _section(config, name[:-1])[name[-1]] = _current_value(path, name, value, former)
    return config, former


def renamed_flags(flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return command-line flags with today's keys and values, and what they have by a former name, with today's."""
    now: list[str] = []
    former: dict[str, str] = {}
    path: Path = ()
    name: Path = ()
    for flag in flags:
        if not flag.startswith("--"):  # the value of the flag before
            now.append(_current_value(path, name, flag, former) if name else flag)
            continue
        written, has_value, value = flag.removeprefix("--").partition("=")
        path = tuple(written.replace("-", "_").split("."))
        name = _current(path)
        if has_value or name != path:
            value = _current_value(path, name, value, former)
        written = written if name == path else ".".join(name).replace("_", "-")
        now.append(f"--{written}{has_value}{value}")
    return now, former


def describe(former: Mapping[str, str]) -> str:
    """Return one line about the former names in use."""
    names = "; ".join(f"{key} is now {name}" for key, name in former.items())
    return f"former names of config keys, which the next release will refuse: {names}"


def current_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step with today's names."""
    return {_current_metric(name): value for name, value in metrics.items()}


@functools.cache
def _current_metric(name: str) -> str:
    for former, begin in METRICS.items():
        if name.startswith(former):
            return begin + name.removeprefix(former)
    return name


def _current(path: Path) -> Path:
    """Return today's path of a key, such as ("learner", "weight_sync", "ports")."""
    for length in range(len(path), 0, -1):
        if name := KEYS.get(".".join(path[:length])):
            return (*name.split("."), *path[length:])
    return path


def _current_value(path: Path, name: Path, value: Any, former: dict[str, str]) -> Any:
    """Return today's spelling of a value, and record a former name of the key or the value."""
    key, key_now = ".".join(path), ".".join(name)
    spelled = str(value).lower() if isinstance(value, bool) else value
    now = VALUES.get(key_now, {}).get(spelled, value) if isinstance(spelled, str) else value
    if path != name:
        former[key] = key_now
    elif now is not value:  # a NaN does not equal itself
        former[f'{key} = "{value}"'] = f'"{now}"'
    return now


def _leaves(table: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of each key, and each empty section as {}."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def _section(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the section at a path, which is made if missing."""
    section = config
    for depth, key in enumerate(path, start=1):
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            name = ".".join(path[:depth])
            raise ConfigError(f"{name} = {section!r} is not a section; write [{name}]")
    return section
