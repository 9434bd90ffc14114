"""Writing the files of a run, JSON lines among them.

A disk that is full or broken ends the run with a sentence, and what was committed stays. Files of JSON lines are appended to and read
from their ends, because they may be longer than anybody wants to read.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from protocol.durable import sync
from protocol.errors import SlipstreamError

MIB = 1 << 20
MOUNTS = Path("/proc/self/mountinfo")
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "9p", "sshfs", "pvfs", "orangefs", "wekafs",
           "panfs", "virtiofs", "s3fs", "gcsfuse", "gfs", "ocfs")  # fmt: skip
"""Parts of the types of file systems that other machines may write to as well."""
BLOCK_BYTES = 1 << 16


class DiskError(SlipstreamError):
    """A file of the run could not be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises DiskError, which names `path`, for every way in which Python, safetensors and torch.save (a RuntimeError that
    does not say why) tell that a write failed.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        num_free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free / MIB
        raise DiskError(
            f"{path} could not be written ({error}); {num_free:,.1f} MiB are free on its disk. The run stops and keeps what it "
            "committed before: free some space, then start it again with --resume"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, a power failure included. Raises DiskError."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with writing(path):
            aside.write_bytes(content)
            sync(aside)  # else the name may survive the content
            aside.replace(path)
            sync(path.parent)
    except DiskError:
        aside.unlink(missing_ok=True)
        raise


def network_file_system(path: Path) -> str | None:
    """The type of the file system that `path` lies on, if that is shared over a network."""
    try:
        mounts = MOUNTS.read_text()
    except OSError:  # not Linux, or no /proc
        return None
    kind = file_system_of(path.resolve(), mounts)
    return kind if kind is not None and any(name in kind for name in NETWORK) else None


def file_system_of(path: Path, mounts: str) -> str | None:
    """The type of the file system at a path without links, by the content of /proc/self/mountinfo."""
    found, longest = None, -1
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        point = Path(
            mount.split(" ")[4].encode("latin-1", "replace").decode("unicode_escape")
        )  # a space is written \\040
        if path.is_relative_to(point) and len(point.parts) >= longest:  # of two at one point the later covers the other
            found, longest = source.split(" ")[0], len(point.parts)
    return found


class Lines:
    """A JSON-lines file to append to. Not buffered: after a write that failed, closing would try it again."""

    def __init__(self, path: Path) -> None:
        """A last line that was cut off, by a kill or a full disk, is taken away."""
        self._path = path
        if path.is_file():
            os.truncate(path, whole_lines(path))
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def append(self, record: dict[str, Any]) -> None:
        """Raises DiskError."""
        line = json.dumps(record).encode() + b"\n"
        with writing(self._path):
            num_written = self._file.write(line)
            if num_written != len(line):
                raise OSError(f"only {num_written} of the last {len(line)} bytes found room")

    def close(self) -> None:
        self._file.close()


def whole_lines(path: Path) -> int:
    """The bytes up to the end of the last whole line, found from the end of the file."""
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
    """The last whole one; nothing of a file without any."""
    end = whole_lines(path)
    num_bytes = BLOCK_BYTES
    with path.open("rb") as file:
        while True:
            start = max(0, end - num_bytes)
            file.seek(start)
            *before, line = file.read(end - start).removesuffix(b"\n").split(b"\n")
            if before or start == 0:
                return line
            num_bytes *= 2


def ends_of(path: Path, num_bytes: int) -> list[bytes]:
    """The whole lines among the first and the last so many bytes; all lines of a file that has no more."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= 2 * num_bytes:
            return file.read().split(b"\n")
        *head, _ = file.read(num_bytes).split(b"\n")
        file.seek(size - num_bytes)
        _, *tail = file.read().split(b"\n")
    return head + tail
