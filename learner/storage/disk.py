"""Writing the files of a run. A disk that is full or broken ends the run with a sentence, and what was committed stays."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from protocol.durable import sync
from protocol.errors import SlipstreamError

MIB = 1 << 20
MOUNTS = Path("/proc/self/mountinfo")
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "9p", "sshfs", "pvfs", "orangefs", "wekafs",
           "panfs", "virtiofs", "s3fs", "gcsfuse", "gfs", "ocfs")  # fmt: skip
"""Parts of the types of file systems that other machines may write to as well."""


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
