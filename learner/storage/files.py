"""Durable writes of a run's files, and JSON Lines files.

A full or broken disk ends the run with a clear error, and committed data stays. JSON Lines files are appended
to and read from their ends, because they may be too long to read whole.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError

from protocol.durable import sync
from protocol.errors import SlipstreamError

MIB = 1 << 20
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "9p", "sshfs", "pvfs",
           "orangefs", "wekafs", "panfs", "virtiofs", "s3fs", "gcsfuse", "gfs", "ocfs")  # fmt: skip
"""Substrings of the types of file systems that other machines may also write to."""
BLOCK_BYTES = 1 << 16
TORCH_SAVE_FAILED = re.compile("inline_container|PytorchStreamWriter|Parent directory")
"""Pattern of torch.save's RuntimeErrors. From another rank, they come without the error of the system."""


class DiskError(SlipstreamError):
    """A file of the run could not be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise DiskError, naming `path`, if a write fails.

    Covers the errors of Python, of safetensors, and of torch.save, whose RuntimeError does not give the
    reason. Other RuntimeErrors, as of a collective or a GPU without memory, pass unchanged.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not TORCH_SAVE_FAILED.search(str(error)):
            raise
        num_free = shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free / MIB
        raise DiskError(
            f"{path} could not be written ({error}); {num_free:,.1f} MiB are free on its disk. The run stops, and "
            "everything committed before is kept: free some space, then continue with --resume"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, even on a power failure.

    Raises:
        DiskError: The file could not be written.
    """
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with writing(path):
            aside.write_bytes(content)
            sync(aside)  # otherwise the name may survive without the content
            aside.replace(path)
            sync(path.parent)
    except DiskError:
        aside.unlink(missing_ok=True)
        raise


def network_file_system(path: Path) -> str | None:
    """Return the type of the path's file system if it is a network one, else None."""
    path = path.resolve()
    try:
        mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    except OSError:  # no list of mounts, as in some containers
        return None
    # Of several mounts at the same point, the last one covers the others.
    kind = max(reversed(mounts), key=lambda mount: len(Path(mount.mountpoint).parts)).fstype if mounts else ""
    return kind if any(name in kind for name in NETWORK) else None


class JsonLinesFile:
    """JSON Lines file for appending.

    The file is unbuffered, because closing a buffered one would retry a failed write.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and remove a last line that a kill or a full disk cut off."""
        self._path = path
        if path.is_file():
            os.truncate(path, whole_lines(path))
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def append(self, record: dict[str, Any]) -> None:
        """Append one record. Raises DiskError if it cannot be written."""
        line = json.dumps(record).encode() + b"\n"
        with writing(self._path):
            num_written = self._file.write(line)
            if num_written != len(line):
                raise OSError(f"only {num_written} of the last {len(line)} bytes were written")

    def close(self) -> None:
        self._file.close()


def whole_lines(path: Path) -> int:
    """Return the number of bytes up to the end of the last complete line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def last_line(path: Path) -> bytes:
    """Return the last complete line, or b"" if there is none."""
    return last_lines(path, 1, BLOCK_BYTES)[-1]


def last_lines(path: Path, count: int, max_bytes: int) -> list[bytes]:
    """Return the last complete lines: `count`, or fewer if these exceed `max_bytes`, but at least one.

    An empty file has one empty line.
    """
    end = whole_lines(path)
    num_bytes = BLOCK_BYTES
    with path.open("rb") as file:
        while True:
            start = max(0, end - num_bytes)
            file.seek(start)
            lines = file.read(end - start).removesuffix(b"\n").split(b"\n")
            if start > 0:
                del lines[0]  # its start may be missing
            if start == 0 or len(lines) >= count or (lines and num_bytes >= max_bytes):
                return lines[-count:]
            num_bytes *= 2


def ends_of(path: Path, num_bytes: int) -> list[bytes]:
    """Return the complete lines within the first and last `num_bytes` of the file.

    A file of at most twice that size returns all its lines.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= 2 * num_bytes:
            return file.read().split(b"\n")
        *head, _ = file.read(num_bytes).split(b"\n")
        file.seek(size - num_bytes)
        _, *tail = file.read().split(b"\n")
    return head + tail
