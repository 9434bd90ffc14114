"""The ledger on real SQLite files: legal and illegal transitions, the audit, and disk errors."""

import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest

from learner.rollouts.ledger import SCHEMA_VERSION, Ledger, LedgerError
from learner.rollouts.ledger_storage import TO_SCHEMA_3, PayloadFiles
from protocol.errors import SlipstreamError
from tests.learner.ledgers import receive

TIMEOUT_S = 60.0
SCHEMA_2 = Path(__file__).with_name("ledger_schema_2.sql")


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def admit(ledger: Ledger, slot: int, attempt: int = 0, position: int | None = None) -> str:
    position = slot if position is None else position
    epoch, prompt_id = divmod(position, 10)
    return ledger.admit(slot=slot, attempt=attempt, position=position, epoch=epoch, prompt_id=prompt_id, version=3)


def scored(ledger: Ledger, slot: int, attempt: int = 0) -> str:
    group_id = admit(ledger, slot, attempt)
    assert receive(ledger, group_id, f"bytes of {group_id}".encode(), 2, 100)
    ledger.score(group_id, "[1.0, null]", 1.0)
    return group_id


def test_a_group_passes_all_states_and_every_value_is_stored(ledger):
    assert ledger.next_slot() == ledger.counts().lost == 0
    group_id = admit(ledger, 0)
    assert ledger.next_slot() == 1
    assert [row.state for row in ledger.outstanding()] == ["admitted"]
    assert receive(ledger, group_id, b"\x00\xffbytes", 2, 640)
    assert ledger.payload(group_id) == b"\x00\xffbytes"
    ledger.score(group_id, "[0.5, 1.0]", 0.75)
    (row,) = ledger.outstanding()
    assert (row.state, row.rewards, row.reward_mean, row.num_tokens) == ("scored", "[0.5, 1.0]", 0.75, 640)
    assert (row.epoch, row.prompt_id, row.admitted_version, row.oldest_version) == (0, 0, 3, 2)
    ledger.consume([(group_id, 2)], step=5)
    assert ledger.outstanding() == []
    assert ledger.staleness_histogram() == {2: 1}
    counts = ledger.counts()
    assert (counts.admitted, counts.consumed, counts.dropped, counts.outstanding, counts.lost) == (1, 1, 0, 0, 0)


def test_a_duplicate_an_unknown_and_a_dropped_group_change_nothing(ledger):
    group_id = admit(ledger, 0)
    assert receive(ledger, group_id, b"first", 1, 10)
    assert not receive(ledger, group_id, b"second", 1, 10)
    assert ledger.payload(group_id) == b"first"
    assert not receive(ledger, "77.0", b"never asked for", 1, 10)
    ledger.drop(group_id, "stale")
    assert not receive(ledger, group_id, b"too late", 1, 10)
    assert ledger.counts().admitted == 1


def test_a_group_is_consumed_once_and_a_rejected_batch_changes_nothing(ledger):
    first, second = scored(ledger, 0), scored(ledger, 1)
    ledger.consume([(first, 1)], step=1)
    with pytest.raises(LedgerError, match=r"group 0\.0 is consumed; expected scored"):
        ledger.consume([(second, 1), (first, 1)], step=2)
    assert [row.group_id for row in ledger.outstanding()] == [second]
    with pytest.raises(LedgerError, match=r"group 1\.0 is consumed"):
        ledger.consume([(second, 1), (second, 1)], step=2)
    assert ledger.counts().consumed == 1


@pytest.mark.parametrize(
    ("move", "state"),
    [
        (lambda ledger, group_id: ledger.score(group_id, "[]", None), "admitted"),
        (lambda ledger, group_id: ledger.consume([(group_id, 0)], 1), "admitted"),
        (lambda ledger, group_id: ledger.score("9.9", "[]", None), "not in the ledger"),
        (lambda ledger, group_id: ledger.drop("9.9", "stale"), "not in the ledger"),
        (lambda ledger, group_id: ledger.payload(group_id), "admitted and has no payload"),
    ],
)
def test_an_illegal_transition_names_group_state_and_expected_state(ledger, move, state):
    group_id = admit(ledger, 0)
    with pytest.raises(SlipstreamError, match=f"is {state}.*expected"):
        move(ledger, group_id)
    assert [row.state for row in ledger.outstanding()] == ["admitted"]


def test_a_slot_has_one_live_group_and_none_after_it_failed(ledger):
    admit(ledger, 0)
    with pytest.raises(LedgerError, match="cannot be admitted"):
        admit(ledger, 0)
    with pytest.raises(LedgerError, match=r"group 0\.0 of slot 0, attempt 0, position 0 is admitted"):
        admit(ledger, 0, attempt=1)
    ledger.drop("0.0", "stale")
    with pytest.raises(LedgerError, match="at the same position"):
        admit(ledger, 0, attempt=1, position=3)
    admit(ledger, 0, attempt=1)
    ledger.drop("0.1", "failed")
    with pytest.raises(LedgerError, match=r"dropped \(failed\)"):
        admit(ledger, 0, attempt=2)


def test_a_retry_is_pending_until_admitted_and_only_failures_count_as_attempts(ledger):
    for attempt, reason in enumerate(["engine_error", "stale", "too_few_survivors"]):
        admit(ledger, 0, attempt)
        ledger.drop(f"0.{attempt}", reason)
        assert [row.group_id for row in ledger.retries_due()] == [f"0.{attempt}"]
        assert ledger.counts().lost == 1
    admit(ledger, 0, attempt=3)
    for slot, reason in ((1, "failed"), (2, "no_signal")):
        ledger.drop(scored(ledger, slot), reason)
    assert ledger.retries_due() == [] and ledger.counts().lost == 0
    assert ledger.num_failures() == {0: 2}


def num_files(directory) -> int:
    return len(list((directory / "ledger.db-payloads").iterdir()))


def test_payloads_that_no_resume_needs_are_removed_and_a_rewind_beyond_them_is_rejected(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr("learner.rollouts.ledger_storage.MAX_FILE_BYTES", 1)
    for slot in range(2):
        ledger.consume([(scored(ledger, slot), 1)], step=slot + 1)
    scored(ledger, 2)
    assert receive(ledger, admit(ledger, 3), b"bytes of 3.0")
    ledger.drop(scored(ledger, 4), "no_signal")
    ledger.forget_payloads(1)
    assert [ledger.payload(f"{slot}.0") for slot in (1, 2, 3)] == [b"bytes of 1.0", b"bytes of 2.0", b"bytes of 3.0"]
    assert num_files(tmp_path) == 3, "one file each: those of the first step and of the dropped group are removed"
    with pytest.raises(LedgerError, match=r"group 0\.0 is consumed and has no payload"):
        ledger.payload("0.0")
    ledger.rewind(1)
    with pytest.raises(LedgerError, match="restore the checkpoints of this run"):
        ledger.rewind(0)
    assert ledger.payload("1.0") == b"bytes of 1.0"


def test_a_ledger_that_is_older_than_the_checkpoint_is_rejected(ledger):
    ledger.consume([(scored(ledger, 0), 1)], step=1)
    ledger.rewind(1)
    with pytest.raises(LedgerError, match=r"ends at step 1, but the checkpoint is of step 2: .* Restore ledger\.db"):
        ledger.rewind(2)


def test_a_file_is_kept_while_a_payload_is_needed_and_is_closed_by_a_checkpoint(ledger, tmp_path):
    ledger.consume([(scored(ledger, 0), 1)], step=1)
    scored(ledger, 1)
    ledger.forget_payloads(1)
    assert ledger.payload("1.0") == b"bytes of 1.0" and num_files(tmp_path) == 1
    scored(ledger, 2)
    assert num_files(tmp_path) == 2
    ledger.consume([("1.0", 0)], step=2)
    ledger.forget_payloads(2)
    assert ledger.payload("2.0") == b"bytes of 2.0" and num_files(tmp_path) == 1


def test_other_commits_proceed_during_payload_writes_and_keep_payloads_without_rows(ledger, monkeypatch):
    scored(ledger, 0)
    admit(ledger, 1)
    sync, is_there, may_go_on = PayloadFiles.sync, threading.Event(), threading.Event()

    def sync_and_wait(files):
        sync(files)
        is_there.set()
        assert may_go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(PayloadFiles, "sync", sync_and_wait)
    with ThreadPoolExecutor(3) as threads:
        receiving = threads.submit(receive, ledger, "1.0", b"bytes of 1.0")
        assert is_there.wait(TIMEOUT_S)
        threads.submit(ledger.consume, [("0.0", 1)], 1).result(TIMEOUT_S)
        forgetting = threads.submit(ledger.forget_payloads, 1)
        wait([forgetting], timeout=0.2)
        may_go_on.set()
        assert receiving.result(TIMEOUT_S) and forgetting.result(TIMEOUT_S) is None
    assert ledger.payload("1.0") == b"bytes of 1.0" and ledger.counts().consumed == 1


def test_a_payload_is_durable_before_its_row(ledger, monkeypatch):
    events = []
    sync = os.fsync
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: events.append(os.readlink(f"/proc/self/fd/{descriptor}")) or sync(descriptor)
    )
    ledger._db.set_trace_callback(lambda statement: events.append("COMMIT") if statement == "COMMIT" else None)
    admit(ledger, 0)
    receive(ledger, "0.0")
    files = f"{ledger.path}-payloads"
    assert events == ["COMMIT", str(ledger.path.parent), files, f"{files}/1", "COMMIT"]


def test_leftovers_of_a_kill_after_a_payload_are_harmless_and_removed_by_the_next_checkpoint(ledger, tmp_path):
    scored(ledger, 0)
    ledger.close()
    files = tmp_path / "ledger.db-payloads"
    with (files / "1").open("ab") as file:
        file.write(b"torn")
    (files / "2").write_bytes(b"not one row of it was committed")
    with closing(Ledger(tmp_path / "ledger.db")) as again:
        scored(again, 1)
        assert [again.payload(f"{slot}.0") for slot in range(2)] == [b"bytes of 0.0", b"bytes of 1.0"]
        again.forget_payloads(0)
        assert {path.name for path in files.iterdir()} == {"1", "3"}


def test_rows_of_forgotten_groups_never_share_a_payload_with_others(ledger, tmp_path):
    for slot in (0, 1):
        ledger.consume([(scored(ledger, slot), 0)], step=slot + 1)
    ledger.forget_payloads(2)
    assert num_files(tmp_path) == 0
    ledger.close()
    with closing(Ledger(tmp_path / "ledger.db")) as again:
        for slot in (2, 3):
            scored(again, slot)
        with pytest.raises(LedgerError, match="cannot go back to step 0"):
            again.rewind(0)


def test_a_truncated_payload_is_an_error_with_the_file(ledger, tmp_path):
    scored(ledger, 0)
    os.truncate(tmp_path / "ledger.db-payloads" / "1", 3)
    with pytest.raises(
        LedgerError, match=r"ledger\.db-payloads/1 is truncated: it ends within the payload at offset 0"
    ):
        ledger.payload("0.0")


# ---- files of earlier versions


def make_schema_2(path, num_kept: int = 3) -> None:
    """Write a run up to step 4 with payloads from step 2 on, and one scored, one received and one sent group."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(SCHEMA_2.read_text())
        for slot in range(7):
            state = "consumed" if slot < 4 else ("scored", "received", "admitted")[slot - 4]
            payload = f"bytes of {slot}.0".encode() if 4 - num_kept <= slot < 6 else None
            db.execute(
                "INSERT INTO groups (group_id, slot, attempt, position, epoch, prompt_id, state, admitted_version, "
                "admitted_at,"
                " step, staleness, rewards, payload) VALUES (?, ?, 0, ?, 0, ?, ?, 3, 0.5, ?, ?, ?, ?)",
                (f"{slot}.0", slot, slot, slot, state, slot + 1 if slot < 4 else None, 1 if slot < 4 else None,
                 "[1.0]" if slot < 5 else None, payload),
            )  # fmt: skip
        db.commit()


def assert_goes_on(path) -> None:
    """Check that the ledger equals that of `make_schema_2`, and that a resume from step 2 finds all it needs."""
    with closing(Ledger(path)) as ledger:
        assert ledger.counts().consumed == 4 and ledger.counts().lost == 0
        with pytest.raises(LedgerError, match="cannot go back to step 0"):
            ledger.rewind(0)
        ledger.rewind(2)
        assert [(row.group_id, row.state) for row in ledger.outstanding()] == [
            ("2.0", "scored"), ("3.0", "scored"), ("4.0", "scored"), ("5.0", "received"), ("6.0", "admitted"),
        ]  # fmt: skip
        assert [ledger.payload(f"{slot}.0") for slot in range(2, 6)] == [
            b"bytes of %d.0" % slot for slot in range(2, 6)
        ]
        assert receive(ledger, "6.0", b"new")
        ledger.consume([("2.0", 1)], step=3)
        ledger.forget_payloads(2)
        assert ledger.payload("2.0") == b"bytes of 2.0" and ledger.payload("6.0") == b"new"


class Killed(BaseException):
    """Replaces a kill: no later code runs, and SQLite rolls back."""


def die(*_):
    raise Killed


def copy_one_and_die(monkeypatch):
    append, copied = PayloadFiles.append, []

    def append_or_die(files, payload):
        copied.append(payload)
        return append(files, payload) if len(copied) < 2 else die()

    monkeypatch.setattr(PayloadFiles, "append", append_or_die)


def die_before_the_commit(monkeypatch):
    monkeypatch.setattr("learner.rollouts.ledger_storage.TO_SCHEMA_3", (*TO_SCHEMA_3, "no SQL"))


def die_after_the_commit(monkeypatch):
    monkeypatch.setattr(Ledger, "_give_space_back", die)


@pytest.mark.parametrize("strike", [None, copy_one_and_die, die_before_the_commit, die_after_the_commit])
def test_a_run_of_an_earlier_schema_continues_and_releases_its_space_even_after_a_kill(tmp_path, strike):
    path = tmp_path / "ledger.db"
    make_schema_2(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE groups SET payload = zeroblob(5000000) WHERE slot = 1")
        db.commit()
    if strike is not None:
        with pytest.MonkeyPatch.context() as patch, pytest.raises((Killed, LedgerError)):
            strike(patch)
            Ledger(path)
    Ledger(path).close()
    assert num_files(tmp_path) == 1, "the copies of the killed process are removed"
    assert path.stat().st_size < 100_000, "the table has released its space"
    assert_goes_on(path)


def test_a_file_of_an_earlier_schema_is_readable_without_changes(tmp_path):
    path = tmp_path / "ledger.db"
    make_schema_2(path)
    before = path.read_bytes()
    with closing(Ledger(path, read_only=True)) as ledger:
        assert (ledger.counts().consumed, ledger.counts().outstanding, ledger.staleness_histogram()) == (4, 3, {1: 4})
        assert [row.slot for row in ledger.scored_rows(3)] == [3, 4]
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["ledger.db"]


def test_the_audit_counts_gaps_overtaken_and_duplicated_slots(ledger, tmp_path):
    for slot in range(6):
        scored(ledger, slot)
    ledger.consume([("0.0", 0), ("1.0", 0), ("2.0", 0), ("4.0", 0)], step=1)
    assert ledger.counts().lost == 1, "slot 3 was overtaken by slot 4"
    with sqlite3.connect(tmp_path / "ledger.db") as other:
        other.execute("DELETE FROM groups WHERE slot = 1")
        with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
            other.execute("UPDATE groups SET slot = 0 WHERE slot = 2")
        other.execute("DROP INDEX one_live_group_per_slot")
        other.execute("UPDATE groups SET slot = 0 WHERE slot = 2")
    other.close()
    counts = ledger.counts()
    assert (counts.lost, counts.duplicated) == (3, 1), (
        "slots 1 and 2 have no group, slot 3 is overtaken, slot 0 is duplicated"
    )


def test_threads_share_one_ledger(ledger):
    for slot in range(40):
        admit(ledger, slot)
    with ThreadPoolExecutor(4) as threads:
        accepted = list(threads.map(lambda slot: receive(ledger, f"{slot % 40}.0"), range(4 * 40)))
    assert sum(accepted) == 40 and len(ledger.outstanding()) == 40


def test_unknown_schemas_and_foreign_files_are_rejected_with_a_remedy(tmp_path):
    path = tmp_path / "ledger.db"
    Ledger(path).close()
    for version in (SCHEMA_VERSION + 1, 1):
        with closing(sqlite3.connect(path)) as db:
            db.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(LedgerError, match=f"schema {version}, expected {SCHEMA_VERSION}.*new run directory"):
            Ledger(path)
    (tmp_path / "text.db").write_text("this is no database at all, only a long enough line of text" * 20)
    with pytest.raises(LedgerError, match="not a database"):
        Ledger(tmp_path / "text.db")
    with pytest.raises(LedgerError, match="the ledger does not exist"):
        Ledger(tmp_path / "absent.db", read_only=True)
    assert not (tmp_path / "absent.db").exists()


def test_a_full_disk_stops_the_run_and_keeps_what_was_committed(ledger, monkeypatch):
    for slot in range(3):
        admit(ledger, slot)
    assert receive(ledger, "0.0", b"small")
    write = os.write

    def write_half(descriptor, payload):
        if len(payload) < 4:
            raise OSError(28, "No space left on device")
        return write(descriptor, payload[: len(payload) // 2])

    monkeypatch.setattr("os.write", write_half)
    with pytest.raises(LedgerError, match=r"ledger\.db: .*No space left on device.*free space.*--resume"):
        receive(ledger, "1.0", b"x" * 1_000)
    assert [row.state for row in ledger.outstanding()] == ["received", "admitted", "admitted"]
    monkeypatch.setattr("os.write", write)
    assert receive(ledger, "2.0", b"behind what is left of it")
    assert ledger.payload("0.0") == b"small" and ledger.payload("2.0") == b"behind what is left of it"


def test_a_full_database_stops_the_run(ledger):
    ledger._db.execute(f"PRAGMA max_page_count = {ledger._number('PRAGMA page_count')}")
    with pytest.raises(LedgerError, match=r"full.*--resume"), ledger.batch():
        for slot in range(1000):
            admit(ledger, slot)
    assert ledger.next_slot() == 0


def test_a_lock_of_another_process_is_an_error(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db", timeout_s=0.1)
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="locked"):
        admit(ledger, 0)
    other.execute("ROLLBACK")
    other.close()
    admit(ledger, 0)
    ledger.close()


def test_a_reader_sees_a_running_ledger_and_cannot_change_it(ledger, tmp_path):
    scored(ledger, 0)
    reader = Ledger(tmp_path / "ledger.db", read_only=True)
    assert reader.counts().outstanding == 1
    with pytest.raises(LedgerError, match="readonly"):
        admit(reader, 1)
    ledger.consume([("0.0", 1)], step=1)
    assert reader.counts().consumed == 1
    reader.close()


def test_the_file_is_durable_before_a_call_returns(ledger):
    assert ledger._one("PRAGMA journal_mode") == ("wal",)
    assert ledger._number("PRAGMA synchronous") == 2, "FULL"


def test_a_batch_commits_all_of_its_transitions_or_none(ledger, tmp_path):
    reader = Ledger(tmp_path / "ledger.db", read_only=True)
    with ledger.batch():
        admit(ledger, 0)
        admit(ledger, 1)
        assert reader.counts().admitted == 0, "not committed yet"
    assert reader.counts().admitted == 2
    with pytest.raises(LedgerError, match="cannot be admitted"), ledger.batch():
        admit(ledger, 2)
        admit(ledger, 1)
    assert reader.counts().admitted == 2
    assert ledger.next_slot() == 2
    reader.close()


def test_consumption_continues_after_a_restart_and_knows_the_skipped_slots(ledger):
    assert (ledger.next_slot_to_consume(), ledger.passed_over()) == (0, {})
    for slot in range(4):
        scored(ledger, slot)
    ledger.drop("1.0", "failed")
    ledger.drop("3.0", "stale")
    ledger.consume([("0.0", 0)], step=1)
    ledger.consume([("2.0", 0)], step=2)
    assert (ledger.next_slot_to_consume(), ledger.passed_over()) == (3, {1: "failed"})
    ledger.rewind(1)
    assert (ledger.next_slot_to_consume(), ledger.passed_over()) == (1, {1: "failed"})
    assert ledger.counts().lost == 1, "only the pending retry of slot 3"


def test_a_slot_keeps_its_position_and_the_next_slot_has_a_later_one(ledger):
    assert ledger.next_position() == 0
    admit(ledger, 0)
    admit(ledger, 1, position=4)
    assert (ledger.next_position(), ledger.position_of(1)) == (5, 4)
    with pytest.raises(LedgerError, match="slot 2 is not in the ledger"):
        ledger.position_of(2)


def test_a_replaced_slot_keeps_its_rewards_stays_replaced_and_is_not_lost(ledger):
    for slot in range(3):
        scored(ledger, slot)
    with ledger.batch():
        ledger.drop("1.0", "no_signal")
    ledger.drop("2.0", "stale")
    scored(ledger, 2, attempt=1)
    assert [(row.group_id, row.rewards) for row in ledger.scored_rows(0)] == [
        ("0.0", "[1.0, null]"), ("1.0", "[1.0, null]"), ("2.1", "[1.0, null]"),
    ]  # fmt: skip
    assert ledger.passed_over() == {1: "no_signal"}
    assert ledger.retries_due() == []
    with pytest.raises(LedgerError, match=r"is dropped \(no_signal\)"):
        admit(ledger, 1, attempt=1)
    ledger.consume([("0.0", 0), ("2.1", 0)], step=1)
    assert ledger.counts().lost == 0
    ledger.rewind(0)
    assert ledger.passed_over() == {1: "no_signal"}
