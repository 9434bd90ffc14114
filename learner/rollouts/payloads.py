"""Append-only payload files next to the ledger, removed only as a whole. Used by ledger.py alone.

    ledger.db-payloads/12    payload after payload; a row has the file number, the offset and the size

A payload takes megabytes and never changes. Its row is small and changes four times. SQLite would write the
payload at least twice and walk its pages to free them.
Invariant: after `sync` every appended payload survives a power failure.
Not thread-safe, except `read`: ledger.py holds its lock.
"""

import os
from pathlib import Path
from typing import NamedTuple

from protocol.durable import sync

MAX_FILE_BYTES = 64 << 20
"""Size above which a file gets no more payloads. A file stays as long as one of its payloads is needed."""


class PayloadLocation(NamedTuple):
    """Location of a payload."""

    file: int
    offset: int
    num_bytes: int


class PayloadFiles:
    """Payload files of one ledger. Every method may raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        """Newest file while it may grow. Files of earlier processes never grow: their end may be torn."""
        self._newest = max(self.numbers(), default=0)

    def begin_after(self, number: int) -> None:
        """Give new files only numbers above `number`.

        Rows still name removed files. With a reused number they would point to another group's payload.
        """
        self._newest = max(self._newest, number)

    def numbers(self) -> set[int]:
        """Return the numbers of the existing files."""
        if not self._directory.is_dir():
            return set()
        return {int(path.name) for path in self._directory.iterdir() if path.name.isdecimal()}

    def append(self, payload: bytes) -> PayloadLocation:
        """Append a payload; it is durable after `sync`."""
        if self._descriptor is not None and os.fstat(self._descriptor).st_size >= MAX_FILE_BYTES:
            self.seal()
        if self._descriptor is None:
            self._descriptor = self._begin_file()
        offset = os.fstat(self._descriptor).st_size  # after any partial write that a full disk left
        left = memoryview(payload)
        while left:
            left = left[os.write(self._descriptor, left) :]
        return PayloadLocation(self._newest, offset, len(payload))

    def sync(self) -> None:
        """Make all appended payloads durable."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def seal(self) -> None:
        """Make all appended payloads durable, and start a new file for the next one."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read(self, place: PayloadLocation) -> bytes:
        """Return a payload. Raises FileNotFoundError if its file was removed."""
        with self._path(place.file).open("rb") as file:
            file.seek(place.offset)
            payload = file.read(place.num_bytes)
        if len(payload) < place.num_bytes:
            raise OSError(f"{self._path(place.file)} is truncated: it ends within the payload at offset {place.offset}")
        return payload

    def remove(self, number: int) -> None:
        """Delete a file to free its space."""
        self._path(number).unlink(missing_ok=True)

    def _begin_file(self) -> int:
        if not self._directory.is_dir():
            self._directory.mkdir()
            sync(self._directory.parent)
        self._newest += 1
        descriptor = os.open(self._path(self._newest), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        sync(self._directory)
        return descriptor

    def _path(self, number: int) -> Path:
        return self._directory / str(number)
