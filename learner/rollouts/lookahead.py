"""Lookahead: how many versions ahead of the learner groups are asked for, fixed or following what the run waits for.

    takes of queue.py ─▶ Lookahead.note ─▶ max_staleness of the admission rule (slots.py)

A learner that is the slow side consumes groups as stale as the rule allows, so "auto" looks for the least lookahead that still
keeps it fed:

    it waits for the server, which has room for more sequences     one version more: only the rule holds the server back
    the batch after this one is ready as well, ten times running   one version less: it would still have been in time

By Little's law this ends at the least lookahead L with L · (seconds of a step) ≥ seconds of the slowest group, or where the
server is full. Invariant: least ≤ versions ≤ most, and a change waits until its effect has come through before the next one.
Not thread-safe: queue.py holds its lock.
"""

import logging

from learner.config import LearnerConfig

log = logging.getLogger(__name__)

LEAST = 1
"""At 0 the sides would work in turn, and never at the same time."""
WAITED_SHARE = 0.05
"""Of a step: less than this is not worth staler groups."""
SPARE_TAKES = 10


class Lookahead:
    """`versions` is what the admission rule is given as max_staleness."""

    def __init__(self, config: LearnerConfig) -> None:
        self._is_auto = config.max_staleness == "auto"
        self._most = config.staleness_bound
        self.versions = min(2, self._most) if self._is_auto else self._most
        self._takes_to_come_through = self.versions + 1
        """The first batches of a run, and those after a change, were asked for under another rule."""
        self._spare_takes = 0

    def note(self, *, waited_share: float, has_room: bool, has_spare: bool) -> None:
        """A batch was taken.

        `waited_share`: of the time since the last one, that the server was waited for; `has_room`: it could have generated more
        groups; `has_spare`: another whole batch is ready.
        """
        if not self._is_auto:
            return
        self._spare_takes = self._spare_takes + 1 if has_spare else 0
        if self._takes_to_come_through > 0:
            self._takes_to_come_through -= 1
        elif waited_share > WAITED_SHARE and has_room:
            self._change_to(
                self.versions + 1, f"{waited_share:.0%} of a step was waited for a server with room for more groups"
            )
        elif self._spare_takes >= SPARE_TAKES:
            self._change_to(self.versions - 1, f"{SPARE_TAKES} batches were ready a whole step early")

    def _change_to(self, versions: int, reason: str) -> None:
        versions = min(max(versions, LEAST), self._most)
        self._spare_takes = 0
        if versions != self.versions:
            log.info("max_staleness %d → %d: %s", self.versions, versions, reason)
            self.versions = versions
            self._takes_to_come_through = versions + 1
