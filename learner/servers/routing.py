"""Which server is asked for the next group: the one that owes the fewest. Pure; used by fleet.py.

Of equals it is the one that was chosen longest ago: else the first would get all that is asked for while nobody owes anything.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Load(NamedTuple):
    """What a server has to do: smaller is freer."""

    num_groups: int
    """That it owes."""
    chosen_at: int
    """When it was last chosen, in choices; 0: never."""


def least_loaded(loads: Sequence[Load]) -> int | None:
    """Return the index of the server to ask, None if there is none."""
    return min(range(len(loads)), key=loads.__getitem__, default=None)
