"""Making durable what was written, so that a power failure takes neither a file's content nor its name."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
