"""Models that need no model hub. Each is created once per machine and then cached.

    model = "tiny:digits" ─▶ builtin_model ─▶ lock ─▶ temp directory ─▶ ~/.cache/slipstream/tiny-digits-v1

Invariant: a directory under its final name is complete, whatever processes run concurrently or are killed.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.builtin_models.smollm2 import write_smollm2
from protocol.builtin_models.tiny_digits import write_tiny_digits
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

BUILTIN: dict[str, Callable[[Path, Path], None]] = {
    "tiny:digits": write_tiny_digits,
    "smollm2:135m-instruct": write_smollm2,
}
"""Function that writes each model, given an empty directory and the cache directory for its downloads."""
DOWNLOADED = {"smollm2:135m-instruct"}
LOCK_TIMEOUT_S = 3600.0
LOCK_POLL_S = 0.2


def is_builtin(name: str) -> bool:
    """Return whether a name has the form of a built-in model.

    Neither paths nor hub names contain a colon.
    """
    return ":" in name


def builtin_model(name: str) -> Path:
    """Return the directory of a built-in model, and create the model if necessary.

    Creating it may download up to 89 MiB.

    Raises:
        ConfigError: The name is unknown, the cache cannot be written, or a download or conversion fails.
    """
    path = made_model(name)
    if path.is_dir():
        return path
    try:
        with _locked(path, name):
            if not path.is_dir():
                log.info("creating %s in %s", name, path)
                _make(path, BUILTIN[name])
    except OSError as error:
        raise ConfigError(
            f"model = {name!r} cannot be created in {path}: {error}. Set SLIPSTREAM_HOME to a writable directory"
        ) from error
    return path


def is_at_hand(name: str) -> bool:
    """Return whether `builtin_model` needs no network.

    Raises:
        ConfigError: The name is unknown.
    """
    return made_model(name).is_dir() or name not in DOWNLOADED


def made_model(name: str) -> Path:
    """Return the path of a built-in model, which may not exist yet.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in BUILTIN:
        known = ", ".join(map(repr, BUILTIN))
        raise ConfigError(f"model = {name!r} is not a built-in model. Use one of {known}")
    return cache_dir() / f"{name.replace(':', '-')}-v1"


def cache_dir() -> Path:
    """Return the cache directory: `$SLIPSTREAM_HOME` or `~/.cache/slipstream`."""
    home = os.environ.get("SLIPSTREAM_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "slipstream"


def _make(path: Path, write: Callable[[Path, Path], None]) -> None:
    for left in path.parent.glob(f".{path.name}-*"):  # left by killed processes: only the lock holder writes
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        write(aside, path.parent)
        aside.chmod(0o755)
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Let one process at a time create a model.

    The kernel releases the lock of a process that dies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        is_logged = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"model = {name!r}: another process has been creating it for {LOCK_TIMEOUT_S:.0f} s. "
                        f"Stop the process that holds {lock.name}"
                    ) from None
                if not is_logged:
                    log.info("waiting for another process that is creating %s", name)
                    is_logged = True
                time.sleep(LOCK_POLL_S)
        yield
