"""Run `learner …` in the test's own process: the fastest way to check output and exit code."""

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout

import pytest

from learner.__main__ import main


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, like `run_learner`, but without the log and without binding cores."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.__main__._prepare_to_compute", lambda run: None)
        try:
            main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(["learner", *arguments], code, out.getvalue(), err.getvalue())
