"""Warn of user code that was edited during a run: a process that starts later loads the edited files.

digests_of_files (user_code.py, in each process) ─▶ UserFiles, in the learner ─▶ a warning for each change
"""

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


class UserFiles:
    """Files of user code that processes have loaded."""

    def __init__(self) -> None:
        self._digests: dict[str, set[str]] = {}

    def compare(self, digests: Mapping[str, str]) -> None:
        """Log a warning for each file of a new process that no earlier process has loaded with this content."""
        for file, digest in digests.items():
            known = self._digests.setdefault(file, set())
            if known and digest not in known:
                log.warning(
                    "%s was edited during the run, and processes that start from now on use the edited file; "
                    "do not edit it while the run uses it",
                    file,
                )
            known.add(digest)
