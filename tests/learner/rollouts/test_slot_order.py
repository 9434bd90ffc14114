"""Slots compared with a plain implementation of their rules, and max_staleness = "auto" in a simulated pipeline."""

import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rollouts.slot_order import SPARE_TAKES, AutoStaleness, PassedOver, SlotOrder
from protocol.messages import Generate, Message
from tests.learner.config.settings import ALWAYS, load
from tests.learner.rollouts.hand_server import HandServer, answers, next_slots, rollouts_on

GROUPS_PER_STEP = 3
NUM_STEPS = 200


class PlainSlots:
    """A plain implementation of the rules, slot by slot."""

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
        """Return the number of replaced slots in the step of `slot`. A step has a fixed number of open slots."""
        steps: list[list[int]] = [[]]
        for other in range(self.next_to_take, self.next_to_admit):
            if sum(one not in self.passed_over for one in steps[-1]) == GROUPS_PER_STEP:
                steps.append([])
            steps[-1].append(other)
        (step,) = (step for step in steps if slot in step)
        return sum(self.passed_over.get(other) == "no_signal" for other in step)


@given(data=st.data())
def test_slots_follow_the_rules_for_any_skips_and_resumes(data: st.DataObject) -> None:
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


def seconds_of_questions(num_passed_over: int, *, is_ahead: bool) -> float:
    """Return the shortest of several tries, with skipped slots before or after the next slot to take."""
    next_to_take = 0 if is_ahead else num_passed_over
    passed_over: dict[int, PassedOver] = dict.fromkeys(range(num_passed_over), "no_signal")
    slots = SlotOrder(num_passed_over + 100, next_to_take, passed_over)
    seconds = []
    for _ in range(5):
        started = time.process_time()
        for slot in range(num_passed_over, num_passed_over + 100):
            slots.consumption_index(slot)
            slots.num_new(slot)
            slots.next(8)
            slots.num_replaced_with(slot, 8)
        seconds.append(time.process_time() - started)
    return min(seconds)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_ten_times_as_many_skipped_slots_take_about_the_same_time(is_ahead: bool) -> None:
    few, many = (seconds_of_questions(num, is_ahead=is_ahead) for num in (2_000, 20_000))
    assert many < 5 * few


def lookahead_of(tmp_path: Path, max_staleness: int | str = "auto", **learner: object) -> AutoStaleness:
    return AutoStaleness(load(tmp_path, ALWAYS | {"max_staleness": max_staleness} | learner).learner)


def simulate(
    lookahead: AutoStaleness, latency: float, num_at_once: int, jitter: float = 0.0
) -> tuple[list[int], float]:
    """Simulate a learner with 1 s per batch and a server with `num_at_once` concurrent batches of `latency` seconds.

    Return the lookahead at every step, and the seconds per step of the last half.
    """
    free_at = [0.0] * num_at_once
    ready_at: list[float] = []
    now = last_take = 0.0
    seen, taken_at = [], []
    for version in range(NUM_STEPS):
        while len(ready_at) <= version + lookahead.versions:
            place = min(range(num_at_once), key=free_at.__getitem__)
            late = jitter * (len(ready_at) * 7 % 5) / 4
            free_at[place] = max(free_at[place], now) + latency + late
            ready_at.append(free_at[place])
        came_at = max(now, ready_at[version])
        step_s = max(came_at - last_take, 1e-9)
        num_running = sum(at > came_at for at in ready_at)
        lookahead.update(
            waited_share=(came_at - now) / step_s,
            has_room=num_running < num_at_once,
            has_spare=len(ready_at) > version + 1 and ready_at[version + 1] <= came_at,
        )
        last_take = came_at
        taken_at.append(came_at)
        seen.append(lookahead.versions)
        now = came_at + 1.0
    half = NUM_STEPS // 2
    return seen, (taken_at[-1] - taken_at[half]) / (NUM_STEPS - 1 - half)


@pytest.mark.parametrize(("latency", "least", "jitter"), [(0.3, 1, 0.0), (1.5, 2, 0.04), (3.5, 4, 0.0), (6.9, 7, 0.04)])
def test_auto_staleness_settles_at_the_smallest_lookahead_without_waits(
    tmp_path: Path, latency: float, least: int, jitter: float
) -> None:
    seen, step_s = simulate(lookahead_of(tmp_path), latency, num_at_once=20, jitter=jitter)
    assert set(seen[NUM_STEPS // 2 :]) == {least}
    assert step_s == pytest.approx(1.0, rel=0.02)
    if least > 1:  # and no smaller one would
        _, slower_s = simulate(lookahead_of(tmp_path, least - 1), latency, num_at_once=20)
        assert slower_s > 1.05


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_a_full_server_gets_no_more_requests(tmp_path: Path, num_at_once: int) -> None:
    seen, step_s = simulate(lookahead_of(tmp_path), 4.0 * num_at_once, num_at_once)
    assert max(seen) <= num_at_once + 1
    assert step_s == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(
    ("max_staleness", "most", "latency", "expected"),
    [("auto", 3, 50.0, 3), ("auto", 1, 0.01, 1), (0, 8, 3.0, 0), (5, 8, 3.0, 5)],
)
def test_auto_staleness_stays_within_its_bounds_and_a_number_is_fixed(
    tmp_path: Path, max_staleness: int | str, most: int, latency: float, expected: int
) -> None:
    seen, _ = simulate(lookahead_of(tmp_path, max_staleness, max_auto_staleness=most), latency, num_at_once=99)
    assert max(seen) == expected and (max_staleness == "auto" or set(seen) == {expected})


def test_a_single_delay_of_the_server_has_no_lasting_effect(tmp_path: Path) -> None:
    lookahead = lookahead_of(tmp_path)
    for _ in range(9):
        lookahead.update(waited_share=0.0, has_room=True, has_spare=False)
    lookahead.update(waited_share=0.6, has_room=True, has_spare=False)
    assert lookahead.versions == 3
    for _ in range(SPARE_TAKES):
        lookahead.update(waited_share=0.0, has_room=True, has_spare=True)
    assert lookahead.versions == 2


def test_a_waiting_buffer_requests_more_from_a_server_with_capacity(tmp_path: Path) -> None:
    def slowly(server: HandServer, request: Generate) -> list[Message]:
        time.sleep(0.05)
        return answers(server, request)

    allowed = []
    with (
        HandServer(slowly, max_concurrent_sequences=1000) as server,
        rollouts_on(tmp_path, server, max_staleness="auto", steps=30) as (_, rollouts),
    ):
        for version in range(9):
            rollouts.publish(version, server.server_id)
            assert len(next_slots(rollouts, version)) == 3
            allowed.append(rollouts.pop_metrics()["staleness/allowed"])
            assert len(server.generated) <= (allowed[-1] + version + 1) * 3
    assert allowed[0] == 2 < max(allowed)
