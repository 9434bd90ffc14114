"""Durable writes: a power failure loses neither a file's content nor its name."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
