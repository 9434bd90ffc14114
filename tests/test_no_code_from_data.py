"""Lint rejects every call that turns data into code."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RULES = {"TID251", "S102", "S307", "S506"}
REFUSED = """
import pickle
from pickle import loads
import cloudpickle
import dill
import joblib
import marshal
import shelve
from torch import load
torch.load('x')
torch.load('x', weights_only=False)
np.load('x', allow_pickle=True)
yaml.load('x')
eval('1')
exec('1')
"""
ALLOWED = "import numpy as np\nimport torch\nimport yaml\n"


def test_lint_rejects_calls_that_turn_data_into_code() -> None:
    source = ALLOWED + REFUSED
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "json"]
    command += ["--stdin-filename", "learner/probe.py", "-"]
    done = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True)
    lines = source.splitlines()
    found = {lines[one["location"]["row"] - 1] for one in json.loads(done.stdout) if one["code"] in RULES}
    assert found >= set(REFUSED.split("\n")) - {""} and not found & set(ALLOWED.splitlines())
