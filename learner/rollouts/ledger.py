"""Durable record of all groups: one SQLite row per group, from admission to the step that consumed it.

A group is acknowledged to its server only after `receive` has committed it. It is consumed in the transaction
that records its step. Payloads are in files (ledger_storage.py), so no other commit waits for their bytes. Query it
at any time: `sqlite3 ledger.db 'select state, count(*) from groups group by state'`.

    admit ─▶ admitted ─▶ received ─▶ scored ─▶ consumed        rewind (on resume): consumed ─▶ scored
                 └───────────┴──────────┴────▶ dropped         retried as the next attempt, unless final:
                                                               `failed`, or resampled for `no_signal`

Invariant: every slot is consumed exactly once or skipped for good, in slot order, whatever crashes. `counts`
audits this from the rows alone.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from learner.rollouts.ledger_storage import (
    COLUMNS,
    FINAL_REASONS,
    OLDEST_SCHEMA_VERSION,
    OUTSTANDING,
    SCHEMA,
    SCHEMA_VERSION,
    GroupPayload,
    PayloadFiles,
    PayloadLocation,
    Row,
    group_id_of,
    migrate,
)
from protocol.errors import SlipstreamError

log = logging.getLogger(__name__)

RECEIVE = (
    "UPDATE groups SET state = 'received', payload_file = ?, payload_offset = ?, payload_bytes = ?, oldest_version = ?,"
    " num_tokens = ?, received_at = ? WHERE group_id = ? AND state = 'admitted'"
)
FILES_NEEDED = (
    "SELECT DISTINCT payload_file FROM groups"
    " WHERE state IN ('received', 'scored') OR (state = 'consumed' AND step > ?)"
)


class LedgerError(SlipstreamError):
    """Unreadable or unwritable ledger, or an illegal state transition of a group."""


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Audit of the ledger.

    `admitted` (consumed + dropped + outstanding) counts rows. `lost` and `duplicated` count slots.
    """

    admitted: int
    consumed: int
    dropped: int
    outstanding: int
    lost: int
    """Slots that no group accounts for (a gap or a missing retry), and slots that consumption overtook."""
    duplicated: int
    """Slots consumed more than once."""


class Ledger:
    """Thread-safe ledger of groups.

    Every method that changes the ledger returns after its commit is on disk, except inside `batch`.
    """

    def __init__(self, path: Path, *, read_only: bool = False, timeout_s: float = 10.0) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self._receiving = threading.Lock()
        """Held from a payload's first byte until its row is committed. Until then its file looks unused."""
        self._payloads = PayloadFiles(self.path.with_name(f"{self.path.name}-payloads"))
        if read_only and not self.path.is_file():
            raise LedgerError(f"{self.path}: the ledger does not exist; expected the ledger.db of a run directory")
        # Without a -wal file, no process writes. Immutable mode then also reads from a read-only directory.
        is_closed = read_only and not self.path.with_name(f"{self.path.name}-wal").exists()
        mode = "mode=rwc" if not read_only else "mode=ro&immutable=1" if is_closed else "mode=ro"
        with self._explained():
            self._db = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?{mode}",
                uri=True,
                timeout=timeout_s,
                check_same_thread=False,
                isolation_level=None,  # `_transaction` writes BEGIN and COMMIT
            )
        try:
            self._open(read_only)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with self._receiving, self._explained(OSError):
            self._payloads.seal()
        with self._lock:
            self._db.close()

    # ---- state transitions

    def admit(self, *, slot: int, attempt: int, position: int, epoch: int, prompt_id: int, version: int) -> str:
        """Record a group before its prompt is sent, and return its id.

        A slot has at most one live group at a time, and all its groups have the same prompt. A skipped slot
        gets none.

        Raises:
            LedgerError: The slot does not allow this attempt.
        """
        group_id = group_id_of(slot, attempt)
        with self._transaction():
            others = self._rows(
                f"slot = ? AND (state != 'dropped' OR reason IN ({_marks(FINAL_REASONS)}) OR attempt >= ? OR position "
                "!= ?) OR group_id = ?",
                (slot, *FINAL_REASONS, attempt, position, group_id),
            )
            if others:
                raise LedgerError(
                    f"group {group_id} of slot {slot}, attempt {attempt}, position {position} cannot be admitted: "
                    f"{others[0]}; expected a slot whose last attempt was dropped for a retry, at the same position"
                )
            self._db.execute(
                "INSERT INTO groups (group_id, slot, attempt, position, epoch, prompt_id, state, admitted_version, "
                "admitted_at) VALUES (?, ?, ?, ?, ?, ?, 'admitted', ?, ?)",
                (group_id, slot, attempt, position, epoch, prompt_id, version, time.time()),
            )
        return group_id

    def receive(self, groups: Iterable[GroupPayload]) -> list[str]:
        """Store groups and return the ids of those that are durable now.

        Duplicate, dropped and unknown groups change nothing. Must not be called inside `batch`: other threads
        commit while payloads are written.
        """
        with self._receiving, self._explained(OSError):
            placed = [
                (*self._payloads.append(one.payload), one.oldest_version, one.num_tokens, time.time(), one.group_id)
                for one in groups
            ]
            self._payloads.sync()
            with self._transaction():
                return [values[-1] for values in placed if self._db.execute(RECEIVE, values).rowcount == 1]

    def score(self, group_id: str, rewards_json: str, reward_mean: float | None) -> None:
        with self._transaction():
            self._move(
                group_id,
                ("received",),
                "scored",
                "rewards = ?, reward_mean = ?, scored_at = ?",
                (rewards_json, reward_mean, time.time()),
            )

    def consume(self, group_ids_with_staleness: list[tuple[str, int]], step: int) -> None:
        """Consume all groups of a step, or none.

        Raises:
            LedgerError: A group is not `scored`, for example because it was consumed before.
        """
        now = time.time()
        with self._transaction():
            for group_id, staleness in group_ids_with_staleness:
                changes = "step = ?, staleness = ?, consumed_at = ?"
                self._move(group_id, ("scored",), "consumed", changes, (step, staleness, now))

    def drop(self, group_id: str, reason: str) -> None:
        """Drop a group; FINAL_REASONS end its slot.

        After any other reason the slot is in `retries_due` until its next attempt is admitted.
        """
        with self._transaction():
            self._move(group_id, OUTSTANDING, "dropped", "reason = ?, payload_file = NULL", (reason,))

    def rewind(self, step: int) -> None:
        """Make groups consumed after `step` scored again, to resume from its checkpoint.

        Raises:
            LedgerError: The payload of such a group was removed, or the ledger is older than the checkpoint.
        """
        if (newest := self._number("SELECT coalesce(max(step), 0) FROM groups")) < step:
            raise LedgerError(
                f"{self.path} ends at step {newest}, but the checkpoint is of step {step}: the ledger is missing or of "
                f"an earlier copy. Restore {self.path.name} with its -wal and -payloads, or start a new run whose "
                "model is the model/ of the checkpoint"
            )
        kept = self._payloads.numbers()
        from_model = f"resume from the newest one, or start a new run whose model is the model/ of that of step {step}"
        remedy = from_model if step else "restore the checkpoints of this run, or start a new one in another run_dir"
        with self._transaction():
            later = "state = 'consumed' AND step > ?"
            for group_id, its_step, file in self._all(
                f"SELECT group_id, step, payload_file FROM groups WHERE {later}", (step,)
            ):
                if file not in kept:
                    raise LedgerError(
                        f"{self.path}: cannot go back to step {step}: the payload of group {group_id}, consumed at "
                        f"step {its_step}, was removed because later checkpoints do not need it; {remedy}"
                    )
            self._db.execute(
                f"UPDATE groups SET state = 'scored', step = NULL, staleness = NULL, consumed_at = NULL WHERE {later}",
                (step,),
            )

    def forget_payloads(self, step: int) -> None:
        """Remove the files that no resume needs after the checkpoint of `step`.

        The rows stay unchanged.
        """
        with self._explained(OSError):
            with self._receiving:
                self._payloads.seal()
                superfluous = self._payloads.numbers() - {file for (file,) in self._all(FILES_NEEDED, (step,))}
            for number in superfluous:
                self._payloads.remove(number)

    # ---- queries

    def outstanding(self) -> list[Row]:
        """Return the admitted, received and scored groups in slot order.

        A resume must wait for, score or consume them.
        """
        return self._rows(f"state IN ({_marks(OUTSTANDING)})", OUTSTANDING)

    def retries_due(self) -> list[Row]:
        """Return the dropped attempts whose retry is not admitted yet, in slot order."""
        latest = "attempt = (SELECT max(attempt) FROM groups AS other WHERE other.slot = groups.slot)"
        return self._rows(f"state = 'dropped' AND reason NOT IN ({_marks(FINAL_REASONS)}) AND {latest}", FINAL_REASONS)

    def num_failures(self) -> dict[int, int]:
        """Return the number of retried failures by slot; stale groups do not count."""
        other = ("stale", *FINAL_REASONS)
        where = f"state = 'dropped' AND reason NOT IN ({_marks(other)})"
        return dict(self._all(f"SELECT slot, count(*) FROM groups WHERE {where} GROUP BY slot", other))

    def payload(self, group_id: str) -> bytes:
        row = self._one(
            "SELECT state, payload_file, payload_offset, payload_bytes FROM groups WHERE group_id = ?", (group_id,)
        )
        if row is None or row[1] not in self._payloads.numbers():
            state = "not in the ledger" if row is None else f"{row[0]} and has no payload"
            raise LedgerError(f"group {group_id} is {state}; expected a received group whose payload is still kept")
        with self._explained(OSError):
            return self._payloads.read(PayloadLocation(*row[1:]))

    def next_slot(self) -> int:
        return self._number("SELECT coalesce(max(slot) + 1, 0) FROM groups")

    def next_position(self) -> int:
        """Return the prompt position after the last one that a slot uses."""
        newest = "SELECT max(slot) FROM groups"  # positions increase with slots
        return self._number(f"SELECT coalesce(max(position) + 1, 0) FROM groups WHERE slot = ({newest})")

    def position_of(self, slot: int) -> int:
        """Return the prompt position of a slot. Raises LedgerError if it is unknown."""
        row = self._one("SELECT position FROM groups WHERE slot = ?", (slot,))
        if row is None:
            raise LedgerError(f"slot {slot} is not in the ledger; expected an admitted slot")
        return row[0]

    def scored_rows(self, first_slot: int) -> list[Row]:
        """Return the groups with rewards from `first_slot` on, in slot order.

        There is at most one per slot. The curriculum restores its pass rates from them.
        """
        where = "slot >= ? AND (state IN ('scored', 'consumed') OR reason = 'no_signal') AND rewards IS NOT NULL"
        return self._rows(where, (first_slot,))

    def next_slot_to_consume(self) -> int:
        return self._number("SELECT coalesce(max(slot) + 1, 0) FROM groups WHERE state = 'consumed'")

    def passed_over(self) -> dict[int, Any]:
        """Return the skipped slots and their final reasons."""
        where = f"state = 'dropped' AND reason IN ({_marks(FINAL_REASONS)})"
        return dict(self._all(f"SELECT slot, reason FROM groups WHERE {where} ORDER BY slot", FINAL_REASONS))

    def counts(self) -> LedgerCounts:
        with self._transaction("DEFERRED"):
            num_of = dict(self._all("SELECT state, count(*) FROM groups GROUP BY state"))
            held = f"state != 'dropped' OR reason IN ({_marks(FINAL_REASONS)})"
            accounted = self._number(f"SELECT count(DISTINCT slot) FROM groups WHERE {held}", FINAL_REASONS)
            overtaken = self._number(
                f"SELECT count(DISTINCT slot) FROM groups WHERE state IN ({_marks(OUTSTANDING)})"
                " AND slot < (SELECT max(slot) FROM groups WHERE state = 'consumed')",
                OUTSTANDING,
            )
            duplicated = self._number(
                "SELECT count(*) FROM (SELECT slot FROM groups WHERE state = 'consumed' GROUP BY slot HAVING "
                "count(*) > 1)"
            )
            return LedgerCounts(
                admitted=sum(num_of.values()),
                consumed=num_of.get("consumed", 0),
                dropped=num_of.get("dropped", 0),
                outstanding=sum(num_of.get(state, 0) for state in OUTSTANDING),
                lost=self.next_slot() - accounted + overtaken,
                duplicated=duplicated,
            )

    def staleness_histogram(self) -> dict[int, int]:
        """Return the number of consumed groups by staleness."""
        return dict(
            self._all(
                "SELECT staleness, count(*) FROM groups WHERE state = 'consumed' AND staleness IS NOT NULL"
                " GROUP BY staleness ORDER BY staleness"
            )
        )

    # ---- SQLite

    def _open(self, read_only: bool) -> None:
        with self._explained():
            found = self._number("PRAGMA user_version")
            is_new = not read_only and found == 0 and not self._number("SELECT count(*) FROM sqlite_master")
            if not is_new and not OLDEST_SCHEMA_VERSION <= found <= SCHEMA_VERSION:
                raise LedgerError(
                    f"{self.path}: this file has ledger schema {found}, expected {SCHEMA_VERSION}; continue this run "
                    "with the Slipstream version that wrote it, or start a new run directory"
                )
            if read_only:
                return
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            if is_new:
                self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif found < SCHEMA_VERSION:
                log.info("moving the payloads of %s to files next to it (once, at the first resume)", self.path)
                with self._explained(OSError):
                    migrate(self._db, self._payloads)
            self._payloads.begin_after(self._number("SELECT coalesce(max(payload_file), 0) FROM groups"))
            self._give_space_back()

    def _give_space_back(self) -> None:
        """Vacuum the file if most of it is free, as after a migration."""
        if 2 * self._number("PRAGMA freelist_count") > self._number("PRAGMA page_count"):
            try:
                self._db.execute("VACUUM")
            except sqlite3.Error as error:  # VACUUM needs disk space for a second copy
                log.warning("could not reclaim the free space of %s (%s)", self.path, error)

    def _move(self, group_id: str, allowed: tuple[str, ...], to: str, changes: str, values: tuple) -> None:
        """Make one legal state transition inside the caller's transaction."""
        moved = self._db.execute(
            f"UPDATE groups SET state = ?, {changes} WHERE group_id = ? AND state IN ({_marks(allowed)})",
            (to, *values, group_id, *allowed),
        ).rowcount
        if moved == 1:
            return
        row = self._one("SELECT state, reason FROM groups WHERE group_id = ?", (group_id,))
        state = "not in the ledger" if row is None else _describe(row[0], row[1])
        raise LedgerError(f"group {group_id} is {state}; expected {' or '.join(allowed)}, to make it {to}")

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Combine several state transitions into one durable commit: all or none."""
        with self._transaction():
            yield

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        with self._lock, self._explained():
            if self._db.in_transaction:  # nested in `batch`
                yield
                return
            self._db.execute(f"BEGIN {kind}")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _explained(self, kind: type[Exception] = sqlite3.Error) -> Iterator[None]:
        """Raise an explanatory LedgerError for a full disk, or a locked or broken file."""
        try:
            yield
        except kind as error:
            raise LedgerError(
                f"{self.path}: the ledger could not be read or written ({error}); the run stops so that no group is "
                "lost. Check free space, permissions and that no other process holds the file, then restart with "
                "--resume"
            ) from error

    def _rows(self, where: str, values: tuple) -> list[Row]:
        found = self._all(f"SELECT {COLUMNS} FROM groups WHERE {where} ORDER BY slot, attempt", values)
        return [Row(**dict(zip(Row.__struct_fields__, row, strict=True))) for row in found]

    def _all(self, sql: str, values: tuple = ()) -> list[tuple]:
        with self._lock, self._explained():
            return self._db.execute(sql, values).fetchall()

    def _one(self, sql: str, values: tuple = ()) -> tuple | None:
        with self._lock, self._explained():
            return self._db.execute(sql, values).fetchone()

    def _number(self, sql: str, values: tuple = ()) -> int:
        row = self._one(sql, values)
        return row[0] if row is not None else 0


def _marks(values: tuple[str, ...]) -> str:
    return ", ".join("?" for _ in values)


def _describe(state: str, reason: str | None) -> str:
    return f"{state} ({reason})" if reason else state
