"""The rule that bounds staleness before a prompt is sent. Pure; asked by rollouts.py whenever something changed.

    accepted + running ≤ (max_staleness + version + 1) · groups_per_step            (AReaL, arXiv 2505.24298 eq. 3)

A slot's place is its number less the slots before it that were passed over (given up, or replaced for want of signal).
Groups are consumed in the order of their slots, so accepted + running is the number of places sent, and the group at place
k is consumed at version ⌊k / groups_per_step⌋: at most max_staleness above the version that was current when it was sent.
Passing over a slot later only moves those behind it to lower places, that is to earlier versions, and gives back the one
place that it held: the bound still holds by construction, and a replacement can always be sent.
"""


def num_places_allowed(*, version: int, max_staleness: int, groups_per_step: int, total_groups: int) -> int:
    """How many places may have been sent by now. `total_groups`: all that the run needs."""
    return min((max_staleness + version + 1) * groups_per_step, total_groups)
