"""The rule that bounds staleness before a prompt is sent. Pure; asked by rollouts.py whenever something changed.

    accepted + running ≤ (max_staleness + version + 1) · groups_per_step            (AReaL, arXiv 2505.24298 eq. 3)

Groups are consumed in the order of their slots, so accepted + running is the number of slots sent less those given up, and
the group at place k is consumed at version ⌊k / groups_per_step⌋: at most max_staleness above the version that was
current when it was sent. The bound holds by construction.
"""


def num_slots_allowed(
    *, version: int, max_staleness: int, groups_per_step: int, total_groups: int, num_given_up: int
) -> int:
    """How many slots may have been sent by now. `total_groups`: all the run needs; a slot given up makes room for one."""
    return min((max_staleness + version + 1) * groups_per_step, total_groups) + num_given_up
