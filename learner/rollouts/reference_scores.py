"""Reference logprobs of scored groups, computed by the reference's server while others generate and train.

    group scored ─▶ begin ─▶ one Score per branch (servers/reference_server.py) ─▶ take: the groups of a step

The ledger knows nothing of them: they follow from the group and the reference, so a resume requests them again. A
refresh discards all of them.
Invariant: all groups of a step have the logprobs of one reference, and no group is trained without them.
"""

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait

import msgspec
import numpy as np

from learner.environments.episode import TokenSequence
from learner.rollouts.rollout_group import RolloutGroup
from learner.servers.reference_server import ReferenceServer


class ReferenceScores:
    """Pending and finished reference logprobs, by group. Usable from any thread."""

    def __init__(self, server: ReferenceServer) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._scores: dict[str, Future[list[np.ndarray]]] = {}
        self._seconds: list[float] = []
        """Time that each group took, since the last step."""
        self._waited_s = 0.0

    def begin(self, groups: Collection[RolloutGroup]) -> None:
        """Request the logprobs of groups for which they are not pending."""
        with self._lock:
            for group in groups:
                if group.group_id not in self._scores:
                    self._scores[group.group_id] = self.server.fleet.loop.submit(self._score(group))

    def take(
        self, groups: Sequence[RolloutGroup], kept: Callable[[], Collection[RolloutGroup]], timeout_s: float
    ) -> list[RolloutGroup] | None:
        """Return a step's groups with their logprobs, or None after `timeout_s`.

        `kept` returns the groups of later steps. Their logprobs are requested too, and those of all others are
        forgotten.

        Raises:
            DeadlineExceeded, ParityError, SlipstreamError: As ReferenceServer.score.
        """
        started = time.monotonic()
        self.begin([*groups, *kept()])
        pending = [self._scores[group.group_id] for group in groups]
        done, missing = wait(pending, timeout_s, FIRST_EXCEPTION)
        self._waited_s += time.monotonic() - started
        for scores in done:
            scores.result()
        if missing:
            return None
        with self._lock:
            names = {group.group_id for group in kept()}  # also those that were scored during the wait
            for name in self._scores.keys() - names:
                self._scores.pop(name).cancel()
        return [_with_reference(group, scores.result()) for group, scores in zip(groups, pending, strict=True)]

    def refresh(self, version: int) -> None:
        """Discard all logprobs. From now on, all are those of the copy of `version`."""
        self.server.expect(version)  # first: what begins from now on waits for the new copy
        with self._lock:
            for scores in self._scores.values():
                scores.cancel()
            self._scores.clear()

    @property
    def num_pending(self) -> int:
        with self._lock:
            return sum(not scores.done() for scores in self._scores.values())

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        metrics = {
            "bottleneck/reference": self._waited_s,
            "reference/groups_pending": float(self.num_pending),
            "reference/scored_tokens": float(self.server.num_scored_tokens),
        }
        if self._seconds:
            metrics["reference/score_seconds"] = statistics.fmean(self._seconds)
        self._waited_s, self._seconds, self.server.num_scored_tokens = 0.0, [], 0
        return metrics

    async def _score(self, group: RolloutGroup) -> list[np.ndarray]:
        started = time.monotonic()
        scores = await asyncio.gather(*(self._score_branch(group, branch) for branch in group.completions))
        self._seconds.append(time.monotonic() - started)
        return scores

    async def _score_branch(self, group: RolloutGroup, branch: TokenSequence) -> np.ndarray:
        token_ids = np.concatenate([group.prompt_of(branch), branch.token_ids])
        logprobs = await self.server.score(token_ids)
        return logprobs[len(logprobs) - len(branch.token_ids) :]


def _with_reference(group: RolloutGroup, scores: list[np.ndarray]) -> RolloutGroup:
    branches = [
        msgspec.structs.replace(branch, reference_logprobs=np.ascontiguousarray(logprobs))
        for branch, logprobs in zip(group.completions, scores, strict=True)
    ]
    return msgspec.structs.replace(group, completions=branches)
