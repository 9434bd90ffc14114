"""The limit of open files (`ulimit -n`), for runs with many environments or agents.

The usual soft limit of 1,024 ends with a few hundred processes. The learner and what it starts get a higher one, as far
as the hard limit allows.
"""

import resource
from contextlib import suppress

from protocol.errors import ConfigError

MAX_OPEN_FILES = 65536
"""Soft limit, unless more are needed. Code that closes all possible files still takes only milliseconds."""
NUM_OTHER_FILES = 64
"""Files that a small run has open besides: its ledger, logs, event loops and connections to servers."""


def reserve_open_files(max_concurrent: int, num_per_process: int) -> None:
    """Raise the soft limit for `max_concurrent` processes, each with at least `num_per_process` open files.

    Raises:
        ConfigError: If the hard limit is too low.
    """
    needed = max_concurrent * num_per_process + NUM_OTHER_FILES
    wanted = max(MAX_OPEN_FILES, needed)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError):  # macOS has another limit below its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    if soft < needed:
        raise ConfigError(
            f"learner.environment.max_concurrent = {max_concurrent} needs at least {needed} open files, and this "
            f"machine allows {soft}; raise the hard limit (ulimit -n), or set that key to "
            f"{max((soft - NUM_OTHER_FILES) // num_per_process, 1)} or less"
        )
