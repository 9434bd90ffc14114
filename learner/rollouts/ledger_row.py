"""A group as a row of the ledger: the table in SQL and the same as a struct, and how an older table becomes this one.

Between ledger.py and those who read it. A slot's prompt is decided once, when it is admitted, and from then on read
from here: `position` is the prompt's place in the endless sequence of prompts, which a curriculum lets run ahead of the
slots.
"""

import sqlite3
from typing import NamedTuple

import msgspec

from learner.rollouts.payloads import PayloadFiles

SCHEMA_VERSION = 3
"""2 added `position` and the reason `no_signal`, 3 took the payloads out of the rows."""
OLDEST_SCHEMA_VERSION = 2
"""Read as it is, and migrated when the run is resumed. A file of any other version is refused, see ledger.py."""
FINAL_REASONS = ("failed", "no_signal")
"""Of dropped groups whose slot is passed over; any other reason owes the slot a next attempt at the same prompt."""
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
    """Turn a file of schema 2 into one of schema 3.

    One commit does it: a kill before leaves the file as it was, and the next open starts again.

    Raises sqlite3.Error, OSError.
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
    """One group as the ledger knows it, without its payload."""

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
        """As in "group 3.1 of slot 3, attempt 1, position 3 is dropped (failed)"."""
        reason = f" ({self.reason})" if self.reason else ""
        where = f"slot {self.slot}, attempt {self.attempt}, position {self.position}"
        return f"group {self.group_id} of {where} is {self.state}{reason}"


COLUMNS = ", ".join(Row.__struct_fields__)


class GroupPayload(NamedTuple):
    """A group as it arrived: its completions, packed, and what the ledger tells of them without unpacking them."""

    group_id: str
    payload: bytes
    oldest_version: int
    num_tokens: int


def group_id_of(slot: int, attempt: int) -> str:
    """The name of a group, on the wire too: the same over a resume, so that what comes twice is known."""
    return f"{slot}.{attempt}"
