"""The virtual environment of TRL, created at first use: TRL pinned, shared packages at Slipstream's versions.

    cpu_environment.py: torch's CPU build ─▶ pip, with deploy/cpu.lock as constraints ─▶ ~/.cache/slipstream/bench-<TRL>

Invariant: an environment that is marked as ready is complete.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from deploy.cpu_environment import LOCK, TORCH, install_torch, install_uv, pip_command, run_quietly
from protocol.builtin_models import cache_dir
from protocol.errors import SlipstreamError

TRL = "trl==1.16.0"


def trl_python() -> Path:
    """Return its interpreter. Raises SlipstreamError if pip fails, or exits if torch or uv cannot be installed."""
    venv = cache_dir() / f"bench-{TRL.replace('==', '-')}"
    ready = venv / ".ready"
    if ready.exists() and ready.read_text() == LOCK.read_text():
        return venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    with contextlib.redirect_stdout(sys.stderr):  # the installers print progress; stdout is for the result
        install_uv(venv)
        install_torch(venv)
        command = pip_command(venv, ["install", "-c", str(LOCK), TORCH, TRL])
        output = run_quietly(venv, TRL, command, dict(os.environ))
    if output is not None:
        raise SlipstreamError(f"pip could not install {TRL} into {venv}:\n{output[-3000:]}")
    ready.write_text(LOCK.read_text())
    return venv / "bin" / "python"
