"""Configs of the learner as tests write them: sections over a base, loaded from a file as `learner train` does."""

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
    """`base` with `changes`, key by key; a key set to None is taken out."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in result.items() if value is not None}


def load(tmp_path: Path, learner: Sections) -> LearnerRun:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({"model": "tiny:digits", "run_dir": str(tmp_path / "run"), "learner": learner}))
    return load_config(LearnerRun, [str(file)], "learner train")
