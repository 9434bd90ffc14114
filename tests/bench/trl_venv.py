"""The virtual environment that TRL is measured in, made at first use: TRL pinned, everything both sides have at our versions.

    deploy/cpu_environment.py: torch's CPU build ─▶ pip, with deploy/cpu.lock as constraints ─▶ ~/.cache/slipstream/bench-<TRL>

Invariant: an environment that is marked as ready is whole.
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
    """Return its interpreter. Raises SlipstreamError if pip fails; that of the first two installations ends the program."""
    venv = cache_dir() / f"bench-{TRL.replace('==', '-')}"
    ready = venv / ".ready"
    if ready.exists() and ready.read_text() == LOCK.read_text():
        return venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    with contextlib.redirect_stdout(sys.stderr):  # the installers tell how far they are; stdout is for the result
        install_uv(venv)
        install_torch(venv)
        command = pip_command(venv, ["install", "-c", str(LOCK), TORCH, TRL])
        said = run_quietly(venv, TRL, command, dict(os.environ))
    if said is not None:
        raise SlipstreamError(f"pip could not install {TRL} into {venv}:\n{said[-3000:]}")
    ready.write_text(LOCK.read_text())
    return venv / "bin" / "python"
