"""Choose how many policy versions ahead of the learner groups are requested.

    takes of rollout_buffer.py ─▶ AutoStaleness.update ─▶ max_staleness of the admission rule (slot_order.py)

If the learner is the bottleneck, groups become as stale as the rule allows. "auto" finds the smallest
lookahead that keeps the learner fed. By Little's law, this is the smallest L with L · (seconds of a step) ≥
(seconds of the slowest group), unless the server is full first:

    the learner waits for a server with room for more sequences   one version more: only the rule blocks
    the batch after this one is also ready, ten times in a row    one version less: it would still be in time
Invariant: least ≤ versions ≤ most, and each change takes effect before the next.
Not thread-safe: rollout_buffer.py holds its lock.
"""

import logging

from learner.config import LearnerConfig

log = logging.getLogger(__name__)

LEAST = 1
"""Minimum lookahead. At 0 the learner and the servers never work at the same time."""
WAITED_SHARE = 0.05
"""Share of a step spent waiting below which staler groups are not worth it."""
SPARE_TAKES = 10


class AutoStaleness:
    """Controller of `versions`, the max_staleness of the admission rule."""

    def __init__(self, config: LearnerConfig) -> None:
        self._is_auto = config.max_staleness == "auto"
        self._most = config.staleness_bound
        self.versions = min(2, self._most) if self._is_auto else self._most
        self._takes_until_effective = self.versions + 1
        """Number of next batches that do not reflect the current lookahead yet."""
        self._spare_takes = 0

    def update(self, *, waited_share: float, has_room: bool, has_spare: bool) -> None:
        """Record that a batch was taken.

        Args:
            waited_share: Share of the time since the last batch spent waiting for the server.
            has_room: Whether the server could have generated more groups.
            has_spare: Whether another whole batch is ready.
        """
        if not self._is_auto:
            return
        self._spare_takes = self._spare_takes + 1 if has_spare else 0
        if self._takes_until_effective > 0:
            self._takes_until_effective -= 1
        elif waited_share > WAITED_SHARE and has_room:
            self._change_to(
                self.versions + 1,
                f"the learner waited {waited_share:.0%} of a step for a server with room for more groups",
            )
        elif self._spare_takes >= SPARE_TAKES:
            self._change_to(self.versions - 1, f"{SPARE_TAKES} batches were ready a whole step early")

    def _change_to(self, versions: int, reason: str) -> None:
        versions = min(max(versions, LEAST), self._most)
        self._spare_takes = 0
        if versions != self.versions:
            log.info("changed max_staleness from %d to %d (%s)", self.versions, versions, reason)
            self.versions = versions
            self._takes_until_effective = versions + 1
