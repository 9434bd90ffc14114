"""A private directory for the sockets between vLLM's processes, which those that are killed leave behind.

Whoever made it holds a lock on it for as long as it lives, whatever its process id means elsewhere; one without a lock is of a
server that is gone, and removed by the next that starts. Only sockets are ever removed: a directory with anything else in it is
somebody else's, whatever its name.
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
"""Of a socket's address."""
SOCKET_NAME_BYTES = 37
"""A slash and what vLLM calls it, a UUID."""


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """Have vLLM put its sockets into a new directory until the end, within the one that it would have used.

    Raises ConfigError where its path leaves a socket no name.
    """
    parent = Path(os.environ.get(VARIABLE) or tempfile.gettempdir())
    _remove_abandoned(parent)
    directory, lock = _make(parent)
    os.environ[VARIABLE] = str(directory)
    try:
        if len(os.fsencode(directory)) + SOCKET_NAME_BYTES > MAX_PATH_BYTES:
            raise ConfigError(
                f"sockets in {directory} would have addresses of more than {MAX_PATH_BYTES} bytes; set {VARIABLE} or TMPDIR to "
                "a directory with a shorter path"
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
        # Another server that starts has found it before it was locked.
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
        with contextlib.suppress(OSError):  # vLLM's processes may be removing theirs
            for entry in entries:
                entry.unlink(missing_ok=True)
            directory.rmdir()


def _lock(directory: Path) -> int | None:
    """Lock a directory of our own; None where another holds it, or there is none."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone, another user's, or no directory
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
