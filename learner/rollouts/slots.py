"""Slots: which groups are ready, which slots are passed over, and which are next. Between rollouts.py and the batch.

A slot is a place to be filled by one group, and its number is the order of consumption. Invariant: every slot below
`next_to_take` was taken or passed over, and what is taken depends on the order of the slots alone, not on when a group came.
Not thread-safe: queue.py holds its lock.
"""

from itertools import count, islice
from typing import Literal

from learner.rollouts.scored_group import ScoredGroup

PassedOver = Literal["failed", "no_signal"]


class Slots:
    """The slots of a run, from the first that is not consumed to the last that was admitted."""

    def __init__(self, next_to_admit: int, next_to_take: int, passed_over: dict[int, PassedOver]) -> None:
        self.next_to_admit = next_to_admit
        self.next_to_take = next_to_take
        self.passed_over = passed_over
        self.ready: dict[int, ScoredGroup] = {}

    def place(self, slot: int) -> int:
        """Return how many slots before this one are, or will be, consumed."""
        return slot - sum(other < slot for other in self.passed_over)

    def num_new(self, num_places_allowed: int) -> int:
        """Return how many new slots fit into so many places."""
        return max(0, num_places_allowed - (self.next_to_admit - len(self.passed_over)))

    def next(self, num_groups: int) -> list[int]:
        """Return the next slots that are not passed over, ready or not, admitted or not."""
        open_slots = (slot for slot in count(self.next_to_take) if slot not in self.passed_over)
        return list(islice(open_slots, num_groups))

    def head(self, num_groups: int) -> list[int] | None:
        """Return the next slots, if all of them are ready."""
        slots = self.next(num_groups)
        return slots if all(slot in self.ready for slot in slots) else None

    def take(self, slots: list[int]) -> list[ScoredGroup]:
        """Hand out the groups of `head`."""
        self.next_to_take = slots[-1] + 1
        return [self.ready.pop(slot) for slot in slots]

    def num_replaced_with(self, slot: int, groups_per_step: int) -> int:
        """Return how many groups are replaced in the step of this slot, if every slot still open keeps its place."""
        num_kept = num_replaced = 0
        for other in range(self.next_to_take, self.next_to_admit):
            if other not in self.passed_over:
                num_kept += 1
            elif self.passed_over[other] == "no_signal":
                num_replaced += 1
            if num_kept == groups_per_step:
                if other >= slot:
                    break
                num_kept = num_replaced = 0
        return num_replaced


def num_places_allowed(*, version: int, max_staleness: int, groups_per_step: int, total_groups: int) -> int:
    """The rule that bounds staleness before a prompt is sent: how many places may have been sent by now.

    accepted + running ≤ (max_staleness + version + 1) · groups_per_step            (AReaL, arXiv 2505.24298 eq. 3)

    A slot's place is its number less the slots before it that were passed over (given up, or replaced for want of signal).
    Groups are consumed in the order of their slots, so accepted + running is the number of places sent, and the group at place
    k is consumed at version ⌊k / groups_per_step⌋: at most max_staleness above the version that was current when it was sent.
    Passing over a slot later only moves those behind it to lower places, that is to earlier versions, and gives back the one
    place that it held: the bound still holds by construction, and a replacement can always be sent.

    `total_groups`: all that the run needs.
    """
    return min((max_staleness + version + 1) * groups_per_step, total_groups)
