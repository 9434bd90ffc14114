"""Find the ranks that keep a weight sync waiting, from what all ranks report.

When one rank of a collective stands still, all others soon wait: those before it in a chain to hand on, those
after it for bytes. So the learner's own wait shows only that something is wrong. A rank is late if it is
silent, if it loads one bucket for too long, or if the rank before it waits to hand on and it waits for nobody.
"""

from collections.abc import Mapping

import msgspec


class RankState(msgspec.Struct, frozen=True):
    """What is known of a rank now, in seconds."""

    silent_s: float
    """Time since its last report. 0 once it has received everything."""
    loading_s: float = 0.0
    """Time for which it loads one bucket."""
    blocked_s: float = 0.0
    """Time for which the next rank has taken no byte from it."""


def late_ranks(
    ranks: Mapping[int, RankState],
    parents: Mapping[int, int],
    blocked_at_learner: Mapping[int, float],
    patience_s: float,
) -> set[int]:
    """Return the workers that the others wait for.

    Args:
        ranks: States of all workers.
        parents: Rank that sends to each worker, in a chain. Empty for a collective that is none.
        blocked_at_learner: Time for which each worker has taken no byte from the learner, in a chain.
    """
    standing_s = {rank: max(state.silent_s, state.loading_s) for rank, state in ranks.items()}
    if max(standing_s.values()) > patience_s:
        # Ranks that stand still since about the same time are equally late.
        return {rank for rank, time_s in standing_s.items() if time_s > patience_s / 2}
    late: set[int] = set()
    for rank, parent in parents.items():
        held_up_s = blocked_at_learner.get(rank, 0.0) if parent == 0 else ranks[parent].blocked_s
        # A rank that is held up by the next one was so before the one before it.
        if held_up_s > patience_s and ranks[rank].blocked_s < held_up_s / 2:
            late.add(rank)
    return late
