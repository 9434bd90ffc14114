"""The ledger benchmark runs its threads to the end and checks the ledger."""

from pathlib import Path

import pytest

from tests.bench.ledger import CHECKPOINT_EVERY_STEPS, measure

pytestmark = pytest.mark.system


def test_a_short_run_is_measured_and_its_ledger_is_correct(tmp_path: Path) -> None:
    found = measure(tmp_path, num_groups=4, num_bytes=1 << 20, num_steps=CHECKPOINT_EVERY_STEPS, step_s=0.0)
    assert 0 < found["main_s"] <= found["main_worst_s"] and found["ledger_s"] > found["main_s"]
    assert found["disk_mib"] < CHECKPOINT_EVERY_STEPS, "checkpoints remove old payloads"
