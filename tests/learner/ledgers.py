"""Fill and read ledgers."""

from contextlib import closing
from pathlib import Path

from learner.config import LearnerRun
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger_storage import GroupPayload, Row


def receive(
    ledger: Ledger, group_id: str, payload: bytes = b"payload", oldest_version: int = 0, num_tokens: int = 10
) -> bool:
    """Receive one group; return whether it is durable now and was not before."""
    return ledger.receive([GroupPayload(group_id, payload, oldest_version, num_tokens)]) == [group_id]


def consumed_groups(run: LearnerRun) -> list[tuple[Row, bytes]]:
    """Return the consumed groups in slot order, with payloads. Raises LedgerError unless all payloads are kept."""
    with closing(Ledger(Path(run.run_dir) / "ledger.db", read_only=True)) as ledger:
        return [(row, ledger.payload(row.group_id)) for row in ledger._rows("state = 'consumed'", ())]


def steps_kept(run: LearnerRun) -> set[int]:
    """Return the steps of which a resume would find all groups. The run may be running."""
    with closing(Ledger(Path(run.run_dir) / "ledger.db", read_only=True)) as ledger:
        files = ledger._all("SELECT step, payload_file FROM groups WHERE state = 'consumed'")
        there = ledger._payloads.numbers()
    return {step for step, _ in files} - {step for step, file in files if file not in there}
