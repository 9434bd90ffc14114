"""Which server is asked next: the one that owes the fewest; for a later turn of an episode the one that has its keys and values, unless
that has much more to do. Pure; used by fleet.py.

Of equals it is the one that was chosen longest ago: else the first would get all that is asked for while nobody owes anything.
"""

from collections.abc import Sequence
from typing import NamedTuple

STICKY_MARGIN = 2
"""So many more requests than the freest server may it owe."""


class Load(NamedTuple):
    """What a server has to do: smaller is freer."""

    num_groups: int
    """That it owes."""
    chosen_at: int
    """When it was last chosen, in choices; 0: never."""


def least_loaded(loads: Sequence[Load], stays_at: int | None = None) -> int | None:
    """Return the index of the server to ask, None if there is none; `stays_at`: of the one that gave the turn before."""
    least = min(range(len(loads)), key=loads.__getitem__, default=None)
    if least is None or stays_at is None or loads[stays_at].num_groups > loads[least].num_groups + STICKY_MARGIN:
        return least
    return stays_at
