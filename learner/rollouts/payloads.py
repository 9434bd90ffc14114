"""What groups hold, in files beside the ledger that are appended to and removed whole. Used by ledger.py alone.

    ledger.db-payloads/12    payload after payload; a row has the number of the file, the offset and the size

A payload is megabytes and never changes; its row is small and changes four times. SQLite would write the payload at
least twice and walk its pages to free them. Invariant: after `sync` every appended payload survives a power failure.
Not thread-safe, except `read`: ledger.py holds its lock.
"""

import os
from pathlib import Path
from typing import NamedTuple

from protocol.durable import sync

MAX_FILE_BYTES = 64 << 20
"""A file that is larger gets no more payloads: it stays as long as one of them is needed."""


class Place(NamedTuple):
    """Where a payload is."""

    file: int
    offset: int
    num_bytes: int


class PayloadFiles:
    """The files of one ledger. Every method may raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        """Of the newest file while it may grow. One that an earlier process began never does: its end may be torn."""
        self._newest = max(self.numbers(), default=0)

    def begin_after(self, number: int) -> None:
        """Give no file a number up to this one: rows name removed files, too, and would take another's payload for theirs."""
        self._newest = max(self._newest, number)

    def numbers(self) -> set[int]:
        """Return the numbers of the files that are there."""
        if not self._directory.is_dir():
            return set()
        return {int(path.name) for path in self._directory.iterdir() if path.name.isdecimal()}

    def append(self, payload: bytes) -> Place:
        """Write a payload; it is durable after `sync`."""
        if self._descriptor is not None and os.fstat(self._descriptor).st_size >= MAX_FILE_BYTES:
            self.seal()
        if self._descriptor is None:
            self._descriptor = self._begin_file()
        offset = os.fstat(self._descriptor).st_size  # behind what a full disk has left of another
        left = memoryview(payload)
        while left:
            left = left[os.write(self._descriptor, left) :]
        return Place(self._newest, offset, len(payload))

    def sync(self) -> None:
        """Make durable what was appended."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def seal(self) -> None:
        """Make durable what was appended, and let the next payload begin a file."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read(self, place: Place) -> bytes:
        """Raises FileNotFoundError if the file was removed."""
        with self._path(place.file).open("rb") as file:
            file.seek(place.offset)
            payload = file.read(place.num_bytes)
        if len(payload) < place.num_bytes:
            raise OSError(f"{self._path(place.file)} ends within the payload at {place.offset}")
        return payload

    def remove(self, number: int) -> None:
        """Give the space of a file back."""
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
