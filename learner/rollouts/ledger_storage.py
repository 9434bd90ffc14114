"""Storage of the ledger: rows in SQLite, payloads in files next to it, and batched commits.

    CommitQueue    put ─▶ (more items arrive during the last commit) ─▶ commit of all waiting items ─▶ …
    Row            a group as an SQL row and as a struct; `migrate` converts older tables
    PayloadFiles   ledger.db-payloads/12: payload after payload; a row has the file number, the offset and the size

A commit waits for the disk, so one commit per group would be slow. A payload takes megabytes and never changes.
Its row is small and changes four times. SQLite would write the payload at least twice and walk its pages to free
them, so payload files are append-only and removed only as a whole.
Invariants: items are committed in the order of `put`, each exactly once. A slot's prompt is decided once, at
admission, and read from its row afterwards: `position` is the prompt's index in the endless sequence of prompts, and
a curriculum lets it run ahead of the slot number. After `sync`, every appended payload survives a power failure.
Not thread-safe, except `PayloadFiles.read`: ledger.py holds its lock.
"""

import asyncio
import os
import re
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from protocol.durable import sync

T = TypeVar("T")

MAX_FILE_BYTES = 64 << 20
"""Size above which a file gets no more payloads. A file stays as long as one of its payloads is needed."""
SCHEMA_VERSION = 3
"""Schema version. 2 added `position` and the reason `no_signal`, 3 moved payloads out of the rows."""
OLDEST_SCHEMA_VERSION = 2
"""Oldest version that can be read. A resume migrates it. ledger.py refuses all other versions."""
FINAL_REASONS = ("failed", "no_signal")
"""Drop reasons that skip the slot. After any other reason the slot is retried with the same prompt."""
OUTSTANDING = ("admitted", "received", "scored")
SCHEMA = """
CREATE TABLE groups (
    group_id TEXT PRIMARY KEY,
    slot INTEGER NOT NULL CHECK (slot >= 0),
    attempt INTEGER NOT NULL CHECK (attempt >= 0),
    position INTEGER NOT NULL CHECK (position >= slot),
    epoch INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('admitted', 'received', 'scored', 'consumed', 'dropped')),
    reason TEXT,
    admitted_version INTEGER NOT NULL,
    oldest_version INTEGER,
    step INTEGER,
    staleness INTEGER,
    num_tokens INTEGER,
    reward_mean REAL,
    rewards TEXT,
    admitted_at REAL NOT NULL,
    received_at REAL,
    scored_at REAL,
    consumed_at REAL,
    payload_file INTEGER,
    payload_offset INTEGER,
    payload_bytes INTEGER
) STRICT;
CREATE INDEX groups_by_state ON groups (state, step);
CREATE INDEX groups_by_slot ON groups (slot);
-- The file itself refuses a second live group of a slot, so none can be consumed twice.
CREATE UNIQUE INDEX one_live_group_per_slot ON groups (slot) WHERE state != 'dropped';
"""
TO_SCHEMA_3 = (
    "ALTER TABLE groups ADD COLUMN payload_file INTEGER",
    "ALTER TABLE groups ADD COLUMN payload_offset INTEGER",
    "ALTER TABLE groups ADD COLUMN payload_bytes INTEGER",
    "DROP INDEX IF EXISTS payloads_kept",
    "PRAGMA user_version = 3",
)


class CommitQueue(Generic[T]):
    """Commit queue for use in one event loop."""

    def __init__(self, commit: Callable[[list[T]], Awaitable[None]]) -> None:
        self._commit = commit
        self._waiting: list[T] = []
        self._has_items = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of items that wait for the next commit."""
        return len(self._waiting)

    def put(self, item: T) -> None:
        self._waiting.append(item)
        self._has_items.set()

    async def run(self) -> None:
        """Commit items until canceled. Raises what `commit` raises."""
        while True:
            await self._has_items.wait()
            self._has_items.clear()
            batch, self._waiting = self._waiting, []
            await self._commit(batch)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One group in the ledger, without its payload."""

    group_id: str
    slot: int
    attempt: int
    position: int
    epoch: int
    prompt_id: int
    state: str
    reason: str | None
    admitted_version: int
    oldest_version: int | None
    step: int | None
    staleness: int | None
    num_tokens: int | None
    reward_mean: float | None
    rewards: str | None
    admitted_at: float
    received_at: float | None
    scored_at: float | None
    consumed_at: float | None

    def __str__(self) -> str:
        """Format as in "group 3.1 of slot 3, attempt 1, position 3 is dropped (failed)"."""
        reason = f" ({self.reason})" if self.reason else ""
        where = f"slot {self.slot}, attempt {self.attempt}, position {self.position}"
        return f"group {self.group_id} of {where} is {self.state}{reason}"


COLUMNS = ", ".join(Row.__struct_fields__)


class GroupPayload(NamedTuple):
    """Received group: its packed completions, and the fields for its ledger row."""

    group_id: str
    payload: bytes
    oldest_version: int
    num_tokens: int


def group_id_of(slot: int, attempt: int) -> str:
    """Return the id of a group, in the ledger and on the wire.

    The id is the same after a resume, so duplicates are recognized.
    """
    return f"{slot}.{attempt}"


def slot_of(group_id: str) -> int | None:
    """Return the slot of a group, or None if the id is not a group's of any run."""
    parts = re.fullmatch(r"([0-9]{1,18})\.[0-9]{1,18}", group_id)
    return int(parts[1]) if parts else None


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

    def read(self, location: PayloadLocation) -> bytes:
        """Return a payload. Raises FileNotFoundError if its file was removed."""
        with self._path(location.file).open("rb") as file:
            file.seek(location.offset)
            payload = file.read(location.num_bytes)
        if len(payload) < location.num_bytes:
            raise OSError(
                f"{self._path(location.file)} is truncated: it ends within the payload at offset {location.offset}"
            )
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


def migrate(db: sqlite3.Connection, payloads: PayloadFiles) -> None:
    """Migrate a file from schema 2 to schema 3 in one commit.

    A kill before the commit leaves the file unchanged, and the next open starts again.

    Raises:
        sqlite3.Error: The database cannot be changed.
        OSError: A payload file cannot be written.
    """
    for left_over in payloads.numbers():
        payloads.remove(left_over)
    locations = []
    for (rowid,) in db.execute("SELECT rowid FROM groups WHERE payload IS NOT NULL").fetchall():
        (payload,) = db.execute("SELECT payload FROM groups WHERE rowid = ?", (rowid,)).fetchone()
        locations.append((*payloads.append(payload), rowid))
    payloads.seal()
    db.execute("BEGIN IMMEDIATE")
    for statement in TO_SCHEMA_3:
        db.execute(statement)
    db.executemany(
        "UPDATE groups SET payload_file = ?, payload_offset = ?, payload_bytes = ? WHERE rowid = ?", locations
    )
    db.execute("ALTER TABLE groups DROP COLUMN payload")
    db.execute("COMMIT")
