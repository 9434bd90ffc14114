"""A file of JSON lines to append to and to read from its ends, for it may be longer than anybody wants to read."""

import json
import os
from pathlib import Path
from typing import Any

from learner.storage.disk import writing

BLOCK_BYTES = 1 << 16


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
