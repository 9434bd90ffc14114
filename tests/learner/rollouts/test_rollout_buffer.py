"""What the buffer restores where a run stopped: pass rates from the checkpoint and the rows behind it, not from all rows."""

from pathlib import Path

import pytest

from learner.prompts.curriculum import PassRates
from learner.rewards.workers import FunctionRewards, GroupRewards
from learner.rollouts.ledger import Ledger, Row
from learner.rollouts.rollout_buffer import RolloutBuffer
from learner.run_inputs import RunInputs
from tests.learner.ledgers import receive
from tests.learner.test_train import make_run

NUM_CONSUMED, NUM_KEPT = 12, 8
DECAY = 0.75


class WatchedLedger(Ledger):
    first_slots: list[int]

    def scored_rows(self, first_slot: int) -> list[Row]:
        self.first_slots.append(first_slot)
        return super().scored_rows(first_slot)


def pass_rate_of(slot: int) -> float:
    return slot % 5 / 4


def moving_averages(slots: range) -> dict[int, float]:
    rates: dict[int, float] = {}
    for slot in slots:
        before = rates.get(slot % 3, pass_rate_of(slot))
        rates[slot % 3] = DECAY * before + (1 - DECAY) * pass_rate_of(slot)
    return rates


@pytest.mark.parametrize(
    ("kept", "first_slot"),
    [
        (None, 0),
        (PassRates(reward="another", next_slot=NUM_KEPT, by_prompt={0: 0.5}), 0),
        (PassRates(reward="share_right", next_slot=NUM_KEPT, by_prompt=moving_averages(range(NUM_KEPT))), NUM_KEPT),
    ],
)
def test_a_resume_counts_each_row_once_and_reads_only_those_behind_the_checkpoint(
    tmp_path: Path, kept: PassRates | None, first_slot: int
) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", curriculum={"kind": "pass_rate", "decay": DECAY})
    ledger = WatchedLedger(tmp_path / "ledger.db")
    ledger.first_slots = []
    for slot in range(NUM_CONSUMED):
        group_id = ledger.admit(slot=slot, attempt=0, position=slot, epoch=0, prompt_id=slot % 3, version=0)
        assert receive(ledger, group_id, b"payload", 0, 10)
        functions = [FunctionRewards(name="share_right", rewards=[pass_rate_of(slot)])]
        ledger.score(group_id, GroupRewards(rewards=[0.0], functions=functions).to_json(), 0.0)
        ledger.consume([(group_id, 0)], step=1 + slot)
    restored = RolloutBuffer(run, RunInputs(run).prompts, ledger, kept).pass_rates()
    ledger.close()
    assert ledger.first_slots == [first_slot]
    assert restored is not None and restored.next_slot == NUM_CONSUMED
    assert restored.by_prompt == pytest.approx(moving_averages(range(NUM_CONSUMED)))
