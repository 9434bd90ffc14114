"""The rule that bounds staleness before a prompt is sent. Pure; asked by rollouts.py whenever something changed.

    accepted + running ≤ (max_staleness + version + 1) · groups_per_step            (AReaL, arXiv 2505.24298 eq. 3)

Groups are consumed in the order they were admitted, so the group at place k is consumed at version ⌊k / groups_per_step⌋,
at most max_staleness above the version that was current when it was admitted: the bound holds by construction.
"""


def num_admissible(
    *, accepted: int, running: int, version: int, max_staleness: int, groups_per_step: int, total_groups: int
) -> int:
    """How many more groups may be sent now. `accepted`: consumed or waiting to be; `total_groups`: all the run needs."""
    allowed = min((max_staleness + version + 1) * groups_per_step, total_groups)
    return max(0, allowed - accepted - running)
