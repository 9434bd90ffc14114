"""Slots against the plain rules they stand for, and what they cost a long run."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, islice
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.rollouts.ledger import Ledger
from learner.rollouts.rollout_buffer import RolloutBuffer
from learner.rollouts.slot_order import PassedOver, SlotOrder
from learner.run_inputs import RunInputs
from tests.learner.test_train import make_run

GROUPS_PER_STEP = 3


class PlainSlots:
    """The rules, slot by slot."""

    def __init__(self, next_to_admit: int, next_to_take: int, passed_over: dict[int, PassedOver]) -> None:
        self.next_to_admit, self.next_to_take, self.passed_over = next_to_admit, next_to_take, passed_over
        self.ready: set[int] = set()

    def place(self, slot: int) -> int:
        return sum(other not in self.passed_over for other in range(slot))

    def num_new(self, num_places: int) -> int:
        return max(0, num_places - sum(slot not in self.passed_over for slot in range(self.next_to_admit)))

    def open_slots(self) -> Iterator[int]:
        return (slot for slot in count(self.next_to_take) if slot not in self.passed_over)

    def num_replaced_with(self, slot: int) -> int:
        """Of the step of this slot: steps are so many open slots each, with those passed over before the last of them."""
        steps: list[list[int]] = [[]]
        for other in range(self.next_to_take, self.next_to_admit):
            if sum(one not in self.passed_over for one in steps[-1]) == GROUPS_PER_STEP:
                steps.append([])
            steps[-1].append(other)
        (step,) = (step for step in steps if slot in step)
        return sum(self.passed_over.get(other) == "no_signal" for other in step)


@settings(deadline=None)
@given(data=st.data())
def test_slots_keep_the_rules_whatever_is_passed_over_taken_and_resumed(data: st.DataObject) -> None:
    plain, slots = PlainSlots(0, 0, {}), SlotOrder(0, 0, {})
    for _ in range(data.draw(st.integers(1, 40))):
        move = data.draw(st.sampled_from(["admit", "ready", "pass over", "take", "resume"]))
        missing = [slot for slot in range(plain.next_to_take, plain.next_to_admit)
                   if slot not in plain.passed_over and slot not in plain.ready]  # fmt: skip
        if move == "admit":
            plain.next_to_admit += data.draw(st.integers(1, 4))
            slots.next_to_admit = plain.next_to_admit
        elif move == "ready" and missing:
            slot = data.draw(st.sampled_from(missing))
            plain.ready.add(slot)
        elif move == "pass over" and missing:
            slot, reason = data.draw(st.sampled_from(missing)), data.draw(st.sampled_from(["failed", "no_signal"]))
            plain.passed_over[slot] = reason
            slots.pass_over(slot, reason)
        elif move == "take" and plain.ready >= set(head := slots.next(GROUPS_PER_STEP)):
            assert head == list(islice(plain.open_slots(), GROUPS_PER_STEP))
            slots.advance(head[-1] + 1)
            plain.next_to_take, plain.ready = head[-1] + 1, plain.ready - set(head)
        elif move == "resume":
            slots = SlotOrder(plain.next_to_admit, plain.next_to_take, plain.passed_over)
        ahead = range(plain.next_to_take, plain.next_to_admit)
        assert slots.next(7) == list(islice(plain.open_slots(), 7))
        assert [slots.consumption_index(slot) for slot in ahead] == [plain.place(slot) for slot in ahead]
        assert [slots.num_new(num) for num in (0, 5, 100)] == [plain.num_new(num) for num in (0, 5, 100)]
        assert [slots.num_replaced_with(slot, GROUPS_PER_STEP) for slot in ahead] == [
            plain.num_replaced_with(slot) for slot in ahead
        ]


def cpu_s(work: Callable[[], object]) -> float:
    """The least of several tries, of this process alone: others on the machine do not count."""
    seconds = []
    for _ in range(5):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)


def seconds_of_questions(num_passed_over: int, *, is_ahead: bool) -> float:
    """With so many slots passed over before the next to take, or behind it."""
    next_to_take = 0 if is_ahead else num_passed_over
    passed_over: dict[int, PassedOver] = dict.fromkeys(range(num_passed_over), "no_signal")
    slots = SlotOrder(num_passed_over + 100, next_to_take, passed_over)

    def ask() -> None:
        for slot in range(num_passed_over, num_passed_over + 100):
            slots.consumption_index(slot)
            slots.num_new(slot)
            slots.next(8)
            slots.num_replaced_with(slot, 8)

    return cpu_s(ask)


def test_ten_times_as_many_slots_passed_over_cost_about_the_same() -> None:
    for is_ahead in (False, True):
        few, many = (seconds_of_questions(num, is_ahead=is_ahead) for num in (2_000, 20_000))
        assert many < 3 * few, f"ahead: {is_ahead}"


def seconds_of_a_resume(num_held: int, directory: Path) -> float:
    """That a resume with so many pending groups takes until all are requested, where half of them arrive before."""
    run = make_run(directory, "tcp://127.0.0.1:1", steps=num_held, groups_per_step=8, max_staleness=0)
    prompts = RunInputs(run).prompts
    directory.mkdir()
    with closing(Ledger(directory / "ledger.db")) as ledger:
        with ledger.batch():
            for slot in range(num_held):
                ledger.admit(slot=slot, attempt=0, position=slot, epoch=0, prompt_id=0, version=0)

        def resume() -> None:
            buffer = RolloutBuffer(run, prompts, ledger)
            assert buffer.restore(0) == []
            for slot in range(0, num_held, 2):
                assert buffer.receive(f"{slot}.0") is not None
            requests = [request for version in range(num_held // 8) for request in buffer.admit(version)]
            assert [request.slot for request in requests] == list(range(1, num_held, 2))

        return cpu_s(resume)


def test_a_resume_with_ten_times_as_many_pending_groups_costs_about_ten_times_as_much(tmp_path: Path) -> None:
    few, many = (seconds_of_a_resume(num, tmp_path / str(num)) for num in (400, 4_000))
    assert many < 30 * few
