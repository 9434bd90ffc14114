"""The limit of open files (`ulimit -n`), for runs with many environments, agents or servers.

The usual soft limit of 1,024 ends with a few hundred processes. The learner and what it starts get a higher one, as far
as the hard limit allows.
"""

import resource
from contextlib import suppress

from protocol.errors import ConfigError

MAX_OPEN_FILES = 65536
"""Soft limit, unless more are needed. Code that closes all possible files still takes only milliseconds."""
NUM_OTHER_FILES = 64
"""Files that a small run has open besides: its ledger, logs, event loops and a few connections."""


def reserve_open_files(num: int, files_each: int, what: str) -> None:
    """Raise the soft limit for `num` processes or connections, each with at least `files_each` open files.

    Raises:
        ConfigError: The hard limit is too low. It names `what`, with the key that sets the number.
    """
    needed = num * files_each + NUM_OTHER_FILES
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
            f"{num} {what} need at least {needed} open files, and this machine allows {soft}; raise the hard limit "
            f"(ulimit -n), or have {max((soft - NUM_OTHER_FILES) // files_each, 1)} or less"
        )
