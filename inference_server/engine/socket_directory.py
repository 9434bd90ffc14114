"""Private directory for the sockets between vLLM's processes, which killed processes leave behind.

The server that created the directory holds a lock on it for its lifetime. A process id would not do, because
it means another process in another PID namespace. A directory without a lock belongs to a dead server, and
the next server to start removes it. Only sockets are ever removed: a directory with anything else in it
belongs to someone else, whatever its name.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import ConfigError

VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX = "slipstream-sockets-"
MAX_PATH_BYTES = 107
"""Maximum length of a socket address."""
SOCKET_NAME_BYTES = 37
"""Length of a slash and vLLM's socket name, a UUID."""


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """Make vLLM put its sockets into a new directory in this context.

    The new directory lies within the directory that vLLM would use.

    Raises:
        ConfigError: The path of the directory leaves no room for a socket name.
    """
    parent = Path(os.environ.get(VARIABLE) or tempfile.gettempdir())
    _remove_abandoned(parent)
    directory, lock = _make(parent)
    os.environ[VARIABLE] = str(directory)
    try:
        if len(os.fsencode(directory)) + SOCKET_NAME_BYTES > MAX_PATH_BYTES:
            raise ConfigError(
                f"sockets in {directory} would have addresses of more than {MAX_PATH_BYTES} bytes; set {VARIABLE} or "
                "TMPDIR to a directory with a shorter path"
            )
        yield directory
    finally:
        os.environ[VARIABLE] = str(parent)
        _remove(directory)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    """Return a new directory and a descriptor that locks it."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = _lock(directory)
        if lock is not None and directory.exists():
            return directory, lock
        # Another starting server found the directory before it was locked.
        if lock is not None:
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{PREFIX}*"):
        lock = _lock(directory)
        if lock is not None:
            _remove(directory)
            os.close(lock)


def _remove(directory: Path) -> None:
    entries = list(directory.iterdir())
    if all(entry.is_socket() for entry in entries):
        with contextlib.suppress(OSError):  # vLLM's processes may be removing their sockets.
            for entry in entries:
                entry.unlink(missing_ok=True)
            directory.rmdir()


def _lock(directory: Path) -> int | None:
    """Lock a directory and return its descriptor, or None if locked, foreign or missing."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # The path is gone, another user's, or not a directory.
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
