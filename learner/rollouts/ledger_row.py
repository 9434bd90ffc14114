"""Schema of the ledger: a group as an SQL row and as a struct, and the migration of older tables.

Invariant: a slot's prompt is decided once, at admission, and read from here afterwards. `position` is the
prompt's index in the endless sequence of prompts. A curriculum lets it run ahead of the slot number.
"""

import re
import sqlite3
from typing import NamedTuple

import msgspec

from learner.rollouts.payloads import PayloadFiles

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


def migrate(db: sqlite3.Connection, payloads: PayloadFiles) -> None:
    """Migrate a file from schema 2 to schema 3 in one commit.

    A kill before the commit leaves the file unchanged, and the next open starts again.

    Raises:
        sqlite3.Error: The database cannot be changed.
        OSError: A payload file cannot be written.
    """
    for left_over in payloads.numbers():
        payloads.remove(left_over)
    places = []
    for (rowid,) in db.execute("SELECT rowid FROM groups WHERE payload IS NOT NULL").fetchall():
        (payload,) = db.execute("SELECT payload FROM groups WHERE rowid = ?", (rowid,)).fetchone()
        places.append((*payloads.append(payload), rowid))
    payloads.seal()
    db.execute("BEGIN IMMEDIATE")
    for statement in TO_SCHEMA_3:
        db.execute(statement)
    db.executemany("UPDATE groups SET payload_file = ?, payload_offset = ?, payload_bytes = ? WHERE rowid = ?", places)
    db.execute("ALTER TABLE groups DROP COLUMN payload")
    db.execute("COMMIT")


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
