"""Writing the files of a run. A disk that is full or broken ends the run with a sentence, and what was committed stays."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from protocol.errors import SlipstreamError

MIB = 1 << 20


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
        num_free = shutil.disk_usage(path if path.exists() else path.parent).free / MIB
        raise DiskError(
            f"{path} could not be written ({error}); {num_free:,.1f} MiB are free on its disk. The run stops and keeps what it "
            "committed before: free some space, then start it again with --resume"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises DiskError."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with writing(path):
            aside.write_bytes(content)
            aside.replace(path)
    except DiskError:
        aside.unlink(missing_ok=True)
        raise
