"""Lint refuses whatever would turn data into code; here, that it really does."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layering import ROOT, modules


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle",
        "import dill",
        "import joblib",
        "import marshal",
        "import shelve",
        "import torch\ntorch.load('x')",
        "from torch import load\nload('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x')",
        "eval('1')",
        "exec('1')",
    ],
)
def test_lint_refuses_what_turns_data_into_code(line: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--stdin-filename", "learner/probe.py", "-"]
    refused = subprocess.run(command, cwd=ROOT, input=f"{line}\n", capture_output=True, text=True)
    assert refused.returncode == 1
    assert any(rule in refused.stdout for rule in ("TID251", "S102", "S307", "S506")), refused.stdout


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_trusts_the_code_of_a_model_repository(path: Path) -> None:
    named = {node.arg for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.keyword)}
    assert "trust_remote_code" not in named
