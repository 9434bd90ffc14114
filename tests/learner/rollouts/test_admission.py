"""The admission rule bounds staleness for any timing: simulated runs with random orders, drops and resumes."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.prompts.prompts import Prompts
from learner.rollouts.group_requests import GroupRequest
from learner.rollouts.ledger import Ledger
from learner.rollouts.rollout_buffer import RolloutBuffer
from learner.rollouts.rollout_group import RolloutGroup
from learner.rollouts.slot_order import SlotOrder, num_slots_allowed
from learner.run_inputs import RunInputs
from tests.learner.rollouts.scored_groups import NO_SIGNAL, SIGNAL, receive_and_score
from tests.learner.runs import make_run


class Play:
    """Rollouts without a server: the real buffer and ledger. The test decides which group arrives when."""

    def __init__(self, directory: Path, **learner: Any) -> None:
        self.run = make_run(
            directory, "tcp://127.0.0.1:1", dynamic_sampling=True, max_group_attempts=2,
            reward={"functions": ["exact_match"]}, **learner,
        )  # fmt: skip
        self.config = self.run.learner
        self.ledger = Ledger(directory / "ledger.db")
        self.ledger._db.execute("PRAGMA synchronous = OFF")
        self.version = self.checkpoint = 0
        self.running: dict[str, tuple[GroupRequest, int]] = {}
        """Requests in flight, with the version at sending."""
        self.consumed: list[list[RolloutGroup]] = []
        self.resume()

    def resume(self) -> None:
        """Resume from the checkpoint: later batches are ready again, and requests in flight are sent again."""
        self.ledger.rewind(self.checkpoint)
        self.version, self.running = self.checkpoint, {}
        del self.consumed[self.checkpoint :]
        self.buffer = RolloutBuffer(self.run, prompts_of_all(), self.ledger)
        assert self.buffer.restore(self.version) == []

    def send(self, *requests: GroupRequest) -> None:
        self.running |= {request.group_id: (request, self.version) for request in requests}

    def admit(self) -> None:
        self.send(*self.buffer.admit(self.version))

    def finish(self, group_id: str, outcome: str) -> None:
        request, version = self.running.pop(group_id)
        if outcome == "failed":
            retry = self.buffer.retry(group_id, "engine_error", self.version)
            self.send(*filter(None, [retry]))
        else:
            assert self.buffer.receive(group_id) is request
            rewards = SIGNAL if outcome == "signal" else NO_SIGNAL
            self.buffer.record_scores([receive_and_score(self.ledger, request, version, rewards)])

    def step(self) -> bool:
        groups = self.buffer.pop_batch(
            self.version, 0.0, is_connected=True, published=self.version, on_stale=lambda retry: pytest.fail("stale")
        )
        if groups is None:
            return False
        assert all(self.version - group.oldest_version <= self.config.max_staleness for group in groups)  # type: ignore[operator]
        self.version += 1
        self.ledger.consume([(group.group_id, 0) for group in groups], self.version)
        self.consumed.append(groups)
        return True


@cache
def prompts_of_all() -> Prompts:
    """Return the prompts, which are the same for all runs here."""
    return RunInputs(make_run(Path("unused"), "tcp://127.0.0.1:1")).prompts


@pytest.fixture(autouse=True, scope="module")
def quick_disk() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@settings(max_examples=40)
@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    num_steps=st.integers(1, 5),
    max_resamples=st.integers(1, 3),
    with_resumes=st.booleans(),
    max_file_bytes=st.sampled_from([1, 1000, 1 << 20]),
    choices=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 10**6)), max_size=150),
)
def test_the_bound_holds_and_every_run_finishes_for_any_order_of_arrivals_and_drops(
    max_staleness, groups_per_step, num_steps, max_resamples, with_resumes, max_file_bytes, choices
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.rollouts.ledger_storage.MAX_FILE_BYTES", max_file_bytes)
        play = Play(
            Path(directory), steps=num_steps, groups_per_step=groups_per_step, max_staleness=max_staleness,
            max_resamples=max_resamples,
        )  # fmt: skip
        for event, choice in choices:
            play.admit()
            num_places = len(play.running) + play.buffer.num("scored") + sum(map(len, play.consumed))
            num_allowed = min((max_staleness + play.version + 1), num_steps) * groups_per_step
            assert with_resumes or num_places <= num_allowed, "running + accepted exceeds the rule"
            if event < 4:
                play.step()
            elif event == 4 and with_resumes:
                play.resume()
            elif event == 5:
                play.checkpoint = play.version
                play.ledger.forget_payloads(play.checkpoint)
            elif play.running:
                outcome = "failed" if event == 6 else "none" if event < 15 else "signal"
                play.finish(sorted(play.running)[choice % len(play.running)], outcome)
            counts = play.ledger.counts()
            assert (counts.lost, counts.duplicated, counts.consumed) == (0, 0, sum(map(len, play.consumed)))
        while play.version < num_steps:  # a run that continues always ends
            play.admit()
            if not play.step():
                play.finish(next(iter(play.running)), "none")
        assert [len(batch) for batch in play.consumed] == [groups_per_step] * num_steps
        slots = [group.slot for batch in play.consumed for group in batch]
        assert slots == sorted(set(slots))
        play.ledger.close()


def test_the_rule_lets_the_server_run_ahead_exactly_as_far_as_allowed() -> None:
    def allowed(version: int) -> int:
        return num_slots_allowed(version=version, max_staleness=2, groups_per_step=4, total_groups=100)

    assert [allowed(version=0), allowed(version=3), allowed(version=50)] == [12, 24, 100]
    slots = SlotOrder(next_to_admit=12, next_to_take=0, passed_over={3: "failed", 7: "no_signal"})
    assert slots.num_new(12) == 2
    assert [slots.consumption_index(slot) for slot in (3, 4, 7, 8, 12)] == [3, 3, 6, 6, 10]
