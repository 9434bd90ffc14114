"""The admission rule bounds staleness whatever the timing: played out with random finishing orders."""

from hypothesis import given
from hypothesis import strategies as st

from learner.admission import num_slots_allowed


@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    choices=st.lists(st.integers(0, 10**6), min_size=400, max_size=400),
)
def test_no_group_is_consumed_more_than_max_staleness_versions_after_its_admission(
    max_staleness: int, groups_per_step: int, num_steps: int, choices: list[int]
) -> None:
    version, next_slot, next_to_take = 0, 0, 0
    admitted_at: dict[int, int] = {}
    running: list[int] = []
    ready: set[int] = set()
    staleness: list[int] = []
    largest_gap = 0
    for choice in choices:
        allowed = num_slots_allowed(
            version=version,
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
            total_groups=num_steps * groups_per_step,
            num_given_up=0,
        )
        while next_slot < allowed:
            admitted_at[next_slot] = version
            running.append(next_slot)
            next_slot += 1
        batch = range(next_to_take, next_to_take + groups_per_step)
        if set(batch) <= ready:
            staleness += [version - admitted_at[slot] for slot in batch]
            largest_gap = max(largest_gap, next_slot - next_to_take)
            next_to_take += groups_per_step
            version += 1
        elif running:
            ready.add(running.pop(choice % len(running)))
    assert max(staleness, default=0) <= max_staleness
    assert next_slot <= num_steps * groups_per_step
    assert largest_gap <= (max_staleness + 1) * groups_per_step


def test_the_rule_lets_the_server_run_ahead_exactly_as_far_as_allowed() -> None:
    def allowed(version: int, num_given_up: int = 0) -> int:
        return num_slots_allowed(
            version=version, max_staleness=2, groups_per_step=4, total_groups=100, num_given_up=num_given_up
        )

    assert allowed(version=0) == 12
    assert allowed(version=3) == 24
    assert allowed(version=3, num_given_up=2) == 26
    assert allowed(version=50) == 100
