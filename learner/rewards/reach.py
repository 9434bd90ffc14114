"""Services that reward functions ask and cannot reach: what counts as that, and how long such a function is called again.

    an exception of a function (call.py) ─▶ is_unreachable ─▶ Unreached ─▶ workers.py: Patience ─▶ the call once more, later

Invariant: a service that is down for a while costs time and no group; one that stays away is a failure, after
learner.reward.unreachable_s and with a line in the log before.
"""

import logging
import socket
import threading
import time

import msgspec

log = logging.getLogger(__name__)

NAMES = {
    "APIConnectionError", "ClientConnectionError", "ConnectError", "ConnectTimeout", "ConnectionError", "NewConnectionError", "ReadError",
    "RemoteProtocolError",
}  # fmt: skip
"""Of exceptions of openai, aiohttp, httpx, requests and urllib3, none of which is imported here."""
STATUSES = {429, 502, 503, 504}
"""Of HTTP: too many requests, and a service that is not behind its proxy."""
FIRST_S, LONGEST_S = 1.0, 30.0
"""Until a call is made again: twice as long each time."""
MAX_CAUSES = 8


class Unreached(msgspec.Struct, frozen=True, tag=True):
    """What a function ended with whose service could not be reached."""

    problem: str


def is_unreachable(error: BaseException) -> bool:
    """Whether an exception, or what caused it, means that somebody else was not there."""
    for _ in range(MAX_CAUSES):
        if isinstance(error, ConnectionError | socket.gaierror) or _status(error) in STATUSES:
            return True
        if NAMES & {kind.__name__ for kind in type(error).__mro__}:
            return True
        cause = error.__cause__ or getattr(error, "reason", None)  # urllib keeps it there
        if not isinstance(cause, BaseException):
            return False
        error = cause
    return False


def _status(error: BaseException) -> object:
    """openai's and requests' status_code, aiohttp's status, urllib's code."""
    where = (error, getattr(error, "response", None))
    found = (getattr(one, key, None) for one in where for key in ("status_code", "status", "code"))
    return next((status for status in found if isinstance(status, int)), None)


class Patience:
    """With all functions of a run; thread-safe."""

    def __init__(self, unreachable_s: float) -> None:
        self._unreachable_s = unreachable_s
        self._lock = threading.Lock()
        self._waited_for: set[str] = set()

    def again_in_s(self, name: str, unreached_since: float, num_calls: int, problem: str) -> float | None:
        """Return when to call a function again that has not reached its service in so many calls; None: it has failed."""
        left_s = unreached_since + self._unreachable_s - time.monotonic()
        if left_s <= 0:
            return None
        with self._lock:
            is_new = name not in self._waited_for
            self._waited_for.add(name)
        if is_new:
            log.warning(
                "reward function %s cannot reach what it asks: it %s. It is called again until it can, for at most %g s "
                "(learner.reward.unreachable_s); the run waits", name, problem, self._unreachable_s,
            )  # fmt: skip
        return min(FIRST_S * 2 ** (num_calls - 1), LONGEST_S, left_s)

    def note_reached(self, name: str) -> None:
        with self._lock:
            was_waited_for = name in self._waited_for
            self._waited_for.discard(name)
        if was_waited_for:
            log.info("reward function %s reaches what it asks again", name)
