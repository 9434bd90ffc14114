"""Who is left behind in a push: what one server does not get done must not stop the learner while another has the weights.

    the first server has them ─▶ patience ─▶ whoever is still at it is left behind: it fails, as pusher.py has it, and comes back by itself
    others have weights of this run (a push of its own) ─▶ the same for who has got no further for as long

Between the pusher, which waits, and its pushes (push.py), which each wait for one server. Invariant: while nobody has weights of
this run, nobody is left behind: what a push may take at all is said by `learner.push.timeout_s` alone.
"""

import time
from collections.abc import Collection, Mapping

from learner.servers.fan_out import Share
from learner.servers.member import Member
from learner.servers.push import ServerPush


class Stragglers:
    """Of one round of pushes, used by the thread that waits for them."""

    def __init__(
        self, patience_s: float, have_it: Collection[Member], have_failed: Collection[Member], *, others_serve: bool
    ) -> None:
        """`have_it` and `have_failed` are filled meanwhile; `others_serve`: servers that this round is not for have weights of this run."""
        self._patience_s = patience_s
        self._have_it, self._have_failed, self._others_serve = have_it, have_failed, others_serve
        self._began_at = time.monotonic()
        self._first_at: float | None = None
        """When a server of this round was first seen to have the version."""

    def look(self, pushes: Mapping[Member, tuple[ServerPush, Share]]) -> None:
        """Leave behind who is late. Said again at every look, for a push may just have begun to wait for something else."""
        if self._have_it and self._first_at is None:
            self._first_at = time.monotonic()
        for member, (push, share) in pushes.items():
            has_ended = member in self._have_it or member in self._have_failed
            if not has_ended and (reason := self._why_late(push, share)):
                share.cut_off(reason)
                push.end(reason)

    def _why_late(self, push: ServerPush, share: Share) -> str | None:
        now = time.monotonic()
        if share.failure is not None:
            return share.failure
        if self._first_at is not None and now - self._first_at > self._patience_s:
            return (
                f"others had the version {self._patience_s:g} s before (learner.push.patience_s); it is left behind and gets a "
                "push of its own"
            )
        moved_at = max(self._began_at, push.moved_at, share.moved_at)
        if self._others_serve and now - moved_at > self._patience_s:
            return (
                f"it has got no further for {self._patience_s:g} s, for which the others need not wait (learner.push.patience_s); "
                "it gets another push"
            )
        return None
