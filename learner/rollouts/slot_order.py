"""Order of the slots: which are consumed next, which are passed over, and how far ahead they are requested.

A slot is filled by one group, and its number is the order of consumption. Only the number of skipped slots is
kept below `next_to_take`. Slots above are found by bisection, so a long run costs no more.
`num_slots_allowed` bounds staleness. With max_staleness = "auto", `AutoStaleness` changes the bound during a run.
Invariants: every slot below `next_to_take` was taken or passed over. Slot order alone decides which groups are
taken, not the order of arrivals.
Not thread-safe: rollout_buffer.py holds its lock.
"""

import logging
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import Literal

from learner.config import LearnerConfig

log = logging.getLogger(__name__)

PassedOver = Literal["failed", "no_signal"]
MIN_STALENESS = 1
"""Minimum of max_staleness = "auto". At 0 the learner and the servers never work at the same time."""
WAITED_SHARE = 0.05
"""Share of a step spent waiting below which staler groups are not worth it."""
SPARE_TAKES = 10


class SlotOrder:
    """Order of a run's slots, from the first unconsumed one to the last admitted one."""

    def __init__(self, next_to_admit: int, next_to_take: int, passed_over: Mapping[int, PassedOver]) -> None:
        """Restore the state of a run; `passed_over` has all skipped slots so far."""
        self.next_to_admit = next_to_admit
        self.next_to_take = next_to_take
        self.num_passed_over = len(passed_over)
        """Number of slots skipped since the run started."""
        self._passed_over = sorted(slot for slot in passed_over if slot >= next_to_take)
        self._no_signal = [slot for slot in self._passed_over if passed_over[slot] == "no_signal"]

    def pass_over(self, slot: int, reason: PassedOver) -> None:
        """Skip a slot for good."""
        self.num_passed_over += 1
        insort(self._passed_over, slot)
        if reason == "no_signal":
            insort(self._no_signal, slot)

    def consumption_index(self, slot: int) -> int:
        """Return how many slots before this one are or will be consumed."""
        num_before = self.num_passed_over - len(self._passed_over)
        return slot - num_before - bisect_left(self._passed_over, slot)

    def num_new(self, num_slots_allowed: int) -> int:
        """Return how many slots to admit now, if this many may be sent in total."""
        return max(0, num_slots_allowed - (self.next_to_admit - self.num_passed_over))

    def next(self, num_groups: int) -> list[int]:
        """Return the next slots that are not skipped, even if they are not admitted yet."""
        slots: list[int] = []
        while len(slots) < num_groups:
            first = self._open_slot(len(slots))
            i = bisect_left(self._passed_over, first)
            num_in_a_row = self._passed_over[i] - first if i < len(self._passed_over) else num_groups
            slots += range(first, first + min(num_in_a_row, num_groups - len(slots)))
        return slots

    def advance(self, next_to_take: int) -> None:
        """Leave all slots below this one behind: they are taken, or passed over."""
        self.next_to_take = next_to_take
        for passed in (self._passed_over, self._no_signal):
            del passed[: bisect_left(passed, next_to_take)]

    def num_replaced_with(self, slot: int, groups_per_step: int) -> int:
        """Return how many groups are resampled in the step of this slot.

        Every slot that is still open is assumed to stay.
        """
        num_open_before = slot - self.next_to_take - bisect_left(self._passed_over, slot)
        first = num_open_before - num_open_before % groups_per_step
        begin = self._open_slot(first - 1) + 1 if first else self.next_to_take
        last = self._open_slot(first + groups_per_step - 1)
        return bisect_right(self._no_signal, last) - bisect_left(self._no_signal, begin)

    def _open_slot(self, index: int) -> int:
        """Return the unskipped slot at this index, counted from `next_to_take`."""
        passed, first = self._passed_over, self.next_to_take
        num_passed = bisect_right(range(len(passed)), index, key=lambda i: passed[i] - first - i)
        return first + index + num_passed


def num_slots_allowed(*, version: int, max_staleness: int, groups_per_step: int, total_groups: int) -> int:
    """Return how many slots may have been sent by now, to bound staleness.

    accepted + running ≤ (max_staleness + version + 1) · groups_per_step       (AReaL, arXiv 2505.24298 eq. 3)

    A slot's consumption index is its number minus the skipped slots before it (given up, or resampled without
    signal). Groups are consumed in slot order, so accepted + running counts the indices that are sent. The group
    of index k is consumed at version ⌊k / groups_per_step⌋. This is at most max_staleness above the version when
    it was sent. Skipping a slot later lowers only the indices of the slots behind it, which are then consumed at
    earlier versions. It also frees the slot's own index. The bound therefore holds by construction, and a
    replacement can always be sent.

    `total_groups`: number of groups that the run needs.
    """
    return min((max_staleness + version + 1) * groups_per_step, total_groups)


class AutoStaleness:
    """Controller of `versions`, the max_staleness of the admission rule."""

    def __init__(self, config: LearnerConfig) -> None:
        self._is_auto = config.max_staleness == "auto"
        self._most = config.staleness_bound
        self.versions = min(2, self._most) if self._is_auto else self._most
        self._takes_until_effective = self.versions + 1
        """Number of next batches that do not reflect the current `versions` yet."""
        self._spare_takes = 0

    def update(self, *, waited_share: float, has_room: bool, has_spare: bool) -> None:
        """Record that a batch was taken.

        Args:
            waited_share: Share of the time since the last batch spent waiting for the server.
            has_room: Whether the server could have generated more groups.
            has_spare: Whether another whole batch is ready.
        """
        if not self._is_auto:
            return
        self._spare_takes = self._spare_takes + 1 if has_spare else 0
        if self._takes_until_effective > 0:
            self._takes_until_effective -= 1
        elif waited_share > WAITED_SHARE and has_room:
            self._change_to(
                self.versions + 1,
                f"the learner waited {waited_share:.0%} of a step for a server with room for more groups",
            )
        elif self._spare_takes >= SPARE_TAKES:
            self._change_to(self.versions - 1, f"{SPARE_TAKES} batches were ready a whole step early")

    def _change_to(self, versions: int, reason: str) -> None:
        versions = min(max(versions, MIN_STALENESS), self._most)
        self._spare_takes = 0
        if versions != self.versions:
            log.info("changed max_staleness from %d to %d (%s)", self.versions, versions, reason)
            self.versions = versions
            self._takes_until_effective = versions + 1
