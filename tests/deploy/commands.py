"""The command lines in images, manifests, units and scripts, checked against the commands' flags."""

import shutil
import sys
from pathlib import Path

import pytest

from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol.config import load_config

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
AGENTS = DEPLOY / "agents"
RECIPE = str(DEPLOY / "recipes/gsm8k.toml")


def check(words: list[str]) -> ServerRun | LearnerRun | None:
    """Check the arguments of a command, with a recipe as config file. Return the config. Raises the command's
    errors."""
    match words:
        case [command, "serve", _, *flags] if command.endswith("slipstream"):
            return load_config(ServerRun, [RECIPE, *flags], "slipstream serve")
        case [command, _, run_dir, *flags] if command.endswith("train_or_resume.sh"):
            return check(["slipstream", "train", RECIPE, "--run-dir", run_dir, *flags])
        case ["slipstream", "train", _, *flags]:
            return load_config(
                LearnerRun, [RECIPE, *(flag for flag in flags if flag != "--resume")], "slipstream train"
            )
        case ["slipstream", "colocate", recipe, *flags]:
            return load_config(LearnerRun, [str(ROOT / recipe), *flags], "slipstream colocate")
        case [_, "-c", program]:
            compile(program, "command", "exec")
            return None
    raise AssertionError(f"no known command: {words}")


def tool(name: str) -> str:
    """Return the path of a checker; skip the test without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on this machine; pip install -e '.[dev]' brings those that are Python packages")
    return found
