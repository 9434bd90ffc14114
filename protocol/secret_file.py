"""A file that only its owner may read: CURVE's secret keys and the key of the OpenAI API."""

import os
import stat
from pathlib import Path

from protocol.errors import ConfigError


def read_secret(path: Path, purpose: str) -> str:
    """Return the file's text, stripped. Raises ConfigError when it is missing, empty or open to group or others."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for somebody to write
            raise ConfigError(f"{path} ({purpose}) is no regular file; name one that holds the secret")
        mode, text = status.st_mode & 0o777, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} ({purpose}) cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"{path} ({purpose}) has mode {mode:03o}, so others may read it; run: chmod 600 {path}")
    if not text:
        raise ConfigError(f"{path} ({purpose}) is empty; an empty secret would keep nobody out")
    return text


def write_secret(path: Path, text: str) -> None:
    """Create the file with mode 600. Raises FileExistsError: a secret is never overwritten."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{text}\n")
