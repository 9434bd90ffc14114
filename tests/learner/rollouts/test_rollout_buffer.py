"""The rollout buffer: the states of a slot, and pass rates after a resume."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from learner.prompts.curriculum import PassRates
from learner.rewards.workers import FunctionRewards, GroupRewards
from learner.rollouts.ledger import Ledger, Row
from learner.rollouts.rollout_buffer import MAX_GIVEN_UP, RolloutBuffer
from learner.rollouts.slot_order import SlotOrder
from learner.run_inputs import RunInputs
from protocol.errors import DataError
from tests.learner.ledgers import receive
from tests.learner.rollouts.scored_groups import NO_SIGNAL, receive_and_score
from tests.learner.runs import make_run

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
def test_a_resume_counts_each_row_once_and_reads_only_rows_after_the_checkpoint(
    tmp_path: Path, kept: PassRates | None, first_slot: int
) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", curriculum={"kind": "pass_rate", "decay": DECAY})
    with closing(WatchedLedger(tmp_path / "ledger.db")) as ledger:
        ledger.first_slots = []
        for slot in range(NUM_CONSUMED):
            group_id = ledger.admit(slot=slot, attempt=0, position=slot, epoch=0, prompt_id=slot % 3, version=0)
            assert receive(ledger, group_id)
            functions = [FunctionRewards(name="share_right", rewards=[pass_rate_of(slot)])]
            ledger.score(group_id, GroupRewards(rewards=[0.0], functions=functions).to_json(), 0.0)
            ledger.consume([(group_id, 0)], step=1 + slot)
        restored = RolloutBuffer(run, RunInputs(run).prompts, ledger, kept).pass_rates()
    assert ledger.first_slots == [first_slot]
    assert restored is not None and restored.next_slot == NUM_CONSUMED
    assert restored.by_prompt == pytest.approx(moving_averages(range(NUM_CONSUMED)))


@contextmanager
def a_buffer(tmp_path: Path, **learner: Any) -> Iterator[tuple[RolloutBuffer, Ledger]]:
    """Yield the buffer of a run with one group per step, which is admitted."""
    learner |= {"groups_per_step": 1, "max_staleness": 0, "reward": {"functions": ["exact_match"]}}
    run = make_run(tmp_path, "tcp://127.0.0.1:1", **learner)
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        buffer = RolloutBuffer(run, RunInputs(run).prompts, ledger)
        assert [request.group_id for request in buffer.admit(0)] == ["0.0"]
        yield buffer, ledger


def pop(buffer: RolloutBuffer, version: int, on_stale: Any = pytest.fail) -> list[str] | None:
    groups = buffer.pop_batch(version, 0.0, is_connected=True, published=0, on_stale=on_stale)
    return None if groups is None else [group.group_id for group in groups]


def states(ledger: Ledger) -> dict[str, str]:
    return dict(ledger._all("SELECT group_id, state FROM groups"))


def test_the_ledger_and_the_bottleneck_follow_a_slot_from_admitted_to_consumed(tmp_path: Path) -> None:
    with a_buffer(tmp_path) as (buffer, ledger):
        assert buffer.num("requested") == 1 and states(ledger) == {"0.0": "admitted"}
        assert buffer.waits_for(is_connected=False) == "link" and buffer.waits_for(is_connected=True) == "server"
        request = buffer.receive("0.0")
        assert request is not None and buffer.num("received") == 1
        assert buffer.waits_for(is_connected=True) == "reward"
        buffer.record_scores([receive_and_score(ledger, request, 0)])
        assert buffer.num("scored") == 1 and states(ledger) == {"0.0": "scored"}
        assert pop(buffer, 0) == ["0.0"] and buffer.num("scored") == 0
        assert buffer.waits_for(is_connected=True) == "weight_sync"
        assert [request.group_id for request in buffer.admit(1)] == ["1.0"]


def test_a_group_arrives_once_and_only_for_the_attempt_that_is_pending(tmp_path: Path) -> None:
    with a_buffer(tmp_path) as (buffer, _):
        for group_id in ("0.1", "1.0", "0", "0.0/a/0.0.0", "²²9.0", "9" * 5000 + ".0", ""):
            assert buffer.receive(group_id) is None and buffer.pending(group_id) is None
        retried = buffer.retry("0.0", "engine_error", 0)
        assert retried is not None and retried.group_id == "0.1"
        assert buffer.receive("0.0") is None
        assert buffer.receive("0.1") is retried
        assert buffer.receive("0.1") is None


def test_a_slot_that_failed_too_often_is_skipped_and_replaced(tmp_path: Path) -> None:
    with a_buffer(tmp_path, max_group_attempts=2) as (buffer, ledger):
        assert buffer.retry("0.0", "engine_error", 0) is not None
        assert buffer.retry("0.1", "engine_error", 0) is None
        assert states(ledger) == {"0.0": "dropped", "0.1": "dropped"}
        assert [request.group_id for request in buffer.admit(0)] == ["1.0"]


def test_a_run_ends_when_many_prompts_in_a_row_fail_and_tries_the_last_one_again(tmp_path: Path) -> None:
    with a_buffer(tmp_path, max_group_attempts=1, steps=MAX_GIVEN_UP + 2) as (buffer, ledger):
        for slot in range(MAX_GIVEN_UP - 1):
            assert buffer.retry(f"{slot}.0", "env_error", 0) is None
            (request,) = buffer.admit(0)
        accepted = buffer.receive(request.group_id)
        assert accepted is not None
        buffer.record_scores([receive_and_score(ledger, accepted, 0)])  # one success: the count begins again
        assert pop(buffer, 0) == [accepted.group_id]
        (request,) = buffer.admit(1)
        for _ in range(MAX_GIVEN_UP - 1):
            assert buffer.retry(request.group_id, "env_error", 1) is None
            (request,) = buffer.admit(1)
        with pytest.raises(DataError, match=r"20 prompts in a row failed 1 times each .*\(env_error\).*--resume"):
            buffer.retry(request.group_id, "env_error", 1)
        assert states(ledger)[request.group_id] == "admitted"


def test_a_group_without_signal_is_no_failed_prompt(tmp_path: Path) -> None:
    with a_buffer(tmp_path, max_group_attempts=1, dynamic_sampling=True, max_resamples=99) as (buffer, ledger):
        request = buffer.pending("0.0")
        for _ in range(2):
            for _ in range(MAX_GIVEN_UP - 1):
                assert request is not None and buffer.retry(request.group_id, "env_error", 0) is None
                (request,) = buffer.admit(0)
            assert request is not None and buffer.receive(request.group_id) is not None
            buffer.record_scores([receive_and_score(ledger, request, 0, NO_SIGNAL)])
            assert states(ledger)[request.group_id] == "dropped"
            (request,) = buffer.admit(0)


def test_a_stale_group_is_requested_again_and_does_not_count_as_a_failure(tmp_path: Path) -> None:
    with a_buffer(tmp_path, max_group_attempts=1) as (buffer, ledger):
        request = buffer.receive("0.0")
        assert request is not None
        buffer.record_scores([receive_and_score(ledger, request, 0)])
        retries: list[Any] = []
        assert pop(buffer, 1, retries.append) is None
        assert [retry.group_id for retry in retries] == ["0.1"]
        assert buffer.num("requested") == 1 and states(ledger) == {"0.0": "dropped", "0.1": "admitted"}


def test_a_long_resume_checks_each_pending_group_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_held, place_of, checked = 400, SlotOrder.consumption_index, list[int]()
    monkeypatch.setattr(
        SlotOrder, "consumption_index", lambda order, slot: checked.append(slot) or place_of(order, slot)
    )
    run = make_run(tmp_path, "tcp://127.0.0.1:1", steps=num_held, groups_per_step=8, max_staleness=0)
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        with ledger.batch():
            for slot in range(num_held):
                ledger.admit(slot=slot, attempt=0, position=slot, epoch=0, prompt_id=0, version=0)
        buffer = RolloutBuffer(run, RunInputs(run).prompts, ledger)
        assert buffer.restore(0) == []
        for slot in range(0, num_held, 2):
            assert buffer.receive(f"{slot}.0") is not None
        requests = [request for version in range(num_held // 8) for request in buffer.admit(version)]
    assert [request.slot for request in requests] == list(range(1, num_held, 2))
    assert len(checked) < 2 * num_held
