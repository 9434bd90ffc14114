"""Learner configs for tests: a base with changed keys, loaded from a file as `learner train` does."""

from pathlib import Path
from typing import Any

import tomli_w

from learner.config import LearnerRun
from protocol.config import load_config

Sections = dict[str, Any]
ALWAYS: Sections = {
    "steps": 1,
    "data": {"task": "reverse"},
    "reward": {"functions": ["exact_match"]},
}


def merged(base: Sections, changes: Sections) -> Sections:
    """Return `base` with `changes`. A name such as `loss.clip_low` is a key of a section; None removes a key."""
    result = dict(base)
    for name, value in changes.items():
        key, _, inner = name.partition(".")
        change = {inner: value} if inner else value
        result[key] = merged(result.get(key, {}), change) if isinstance(change, dict) else change
    return {key: value for key, value in result.items() if value is not None}


def load(tmp_path: Path, learner: Sections) -> LearnerRun:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({"model": "tiny:digits", "run_dir": str(tmp_path / "run"), "learner": learner}))
    return load_config(LearnerRun, [str(file)], "learner train")
