"""Baseline of deltas, shared by all workers of one server on one host.

    worker ─ lock ─▶ has another worker decoded this bucket? ─ no ─▶ decode, check, mark ─┬▶ load
                                                             └ yes ───────────────────────┘

Without it, every worker would keep the whole model in host memory and decode all deltas. The memory is a file
of the host's shared memory. Its name is removed once all workers have opened it, so that it is freed with
them. Each worker holds a lock on the file while it uses it. A file without a lock was left by killed workers.
Process ids cannot show that, because containers may share this memory but not their process ids.

Invariant: a bucket is marked with the number of weight syncs that it holds, or with CHANGING. A worker that
finds an unexpected mark fails the weight sync, and with it the session.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from protocol.errors import PushError
from protocol.messages import Manifest
from protocol.weights.buckets import Bucket, aligned, split_into_buckets
from protocol.weights.delta import Baseline

log = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
PREFIX = "slipstream-baseline"
LOCK_TIMEOUT_S = 60.0
"""Maximum time to wait for the lock, in seconds. Its holder decodes one bucket."""
CHANGING = -1
WHOLE_FILE, NOTHING = (struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))
"""Locks in the form of C's struct flock."""


class SharedBaseline(Baseline):
    """This process's view of the baseline of a session.

    Raises:
        OSError: The host's shared memory has no room for it.
    """

    def __init__(self, owner_pid: int, session: str, manifest: Manifest) -> None:
        super().__init__()
        _sweep()
        buckets = split_into_buckets(manifest)
        starts, end = [], aligned(8 * len(buckets))
        for bucket in buckets:
            starts.append(end)
            end += aligned(bucket.num_bytes)
        self._path = DIRECTORY / f"{PREFIX}-{owner_pid}-{hashlib.sha256(session.encode()).hexdigest()[:32]}"
        self._file = _open_in_use(self._path)
        try:
            if os.fstat(self._file).st_uid != os.geteuid():
                raise PermissionError(f"{self._path} belongs to another user")
            os.posix_fallocate(self._file, 0, end)  # otherwise, a full file system is a SIGBUS during a sync
        except OSError:
            os.close(self._file)
            self._path.unlink(missing_ok=True)
            raise
        memory = mmap.mmap(self._file, end)
        self._pushes = torch.frombuffer(memory, dtype=torch.int64, count=len(buckets))
        """Number of weight syncs that each bucket holds, or CHANGING."""
        for bucket, start in zip(buckets, starts, strict=True):
            count = bucket.num_bytes
            self._buffers[bucket.index] = (
                torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start) if count else torch.zeros(0)
            )
        self._seen = [0] * len(buckets)

    @property
    def is_empty(self) -> bool:
        return not any(self._seen)

    @contextmanager
    def changing(self, bucket: Bucket) -> Iterator[bool]:
        seen = self._seen[bucket.index]
        if seen:  # by the second sync, all workers have opened the file
            self._path.unlink(missing_ok=True)
        with self._locked():
            held = int(self._pushes[bucket.index])
            if held == seen:
                self._pushes[bucket.index] = CHANGING
                yield True
                self._pushes[bucket.index] = seen + 1
            elif held == seen + 1:
                yield False
            else:
                raise PushError(
                    "another worker of this host failed during the change; the learner must start a new session"
                )
        self._seen[bucket.index] = seen + 1

    def close(self) -> None:
        super().close()
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        give_up_at = time.monotonic() + LOCK_TIMEOUT_S
        while not self._try_lock():
            if time.monotonic() > give_up_at:
                raise PushError(f"another worker of this host has held the shared baseline for {LOCK_TIMEOUT_S:g} s")
            time.sleep(0.0005)
        try:
            yield
        finally:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, NOTHING)

    def _try_lock(self) -> bool:
        try:
            # A different kind of lock than that of the file's users. The kernel releases both when a process
            # dies.
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, WHOLE_FILE)
        except BlockingIOError:
            return False
        return True


def worker_baseline(owner_pid: int, num_workers: int, session: str, manifest: Manifest) -> Baseline:
    """Return the baseline that a worker decodes deltas onto.

    It is shared if the server has other workers on this host, `num_workers` in all, and the host has room.
    """
    if num_workers == 1:
        return Baseline()
    try:
        return SharedBaseline(owner_pid, session, manifest)
    except OSError as error:
        num_bytes = sum(bucket.num_bytes for bucket in split_into_buckets(manifest))
        log.warning(
            "each of %d workers keeps its own baseline of %.1f GiB, because %s has no room for a shared one (%s); "
            "in a container, raise --shm-size",
            num_workers, num_bytes / 2**30, DIRECTORY, error,
        )  # fmt: skip
        return Baseline()


def _open_in_use(path: Path) -> int:
    """Open or create the file, with a lock that lasts as long as the descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits at most for a check of _sweep
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # removed before it was locked


def _sweep() -> None:
    """Remove the files of servers that were killed before their second weight sync."""
    for path in DIRECTORY.glob(f"{PREFIX}-*"):
        with suppress(OSError):  # another user's file, a file in use, or gone
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
