"""Detect that a reward function cannot reach a service, and schedule its retries.

    an exception of a function (call.py) ─▶ is_unreachable ─▶ UnreachableService ─▶ workers.py: RetrySchedule ─▶ a retry

Invariant: a service that is down for a while costs time but no group. One that stays down is a failure after
learner.reward.unreachable_s, and a warning precedes it.
"""

import logging
import socket
import threading
import time

import msgspec

log = logging.getLogger(__name__)

NAMES = {
    "APIConnectionError", "ClientConnectionError", "ConnectError", "ConnectTimeout", "ConnectionError",
    "NewConnectionError", "ReadError",
    "RemoteProtocolError",
}  # fmt: skip
"""Exceptions of openai, aiohttp, httpx, requests and urllib3. None of them is imported here."""
STATUSES = {429, 502, 503, 504}
"""HTTP statuses: too many requests, and a service that is missing behind its proxy."""
FIRST_S, LONGEST_S = 1.0, 30.0
"""Seconds before a retry: the first delay, which doubles each time, and the longest."""
MAX_CAUSES = 8


class UnreachableService(msgspec.Struct, frozen=True, tag=True):
    """Error of a function whose service could not be reached."""

    problem: str


def is_unreachable(error: BaseException) -> bool:
    """Return whether an exception or one of its causes means an unreachable service."""
    for _ in range(MAX_CAUSES):
        if isinstance(error, ConnectionError | socket.gaierror) or _status(error) in STATUSES:
            return True
        if NAMES & {kind.__name__ for kind in type(error).__mro__}:
            return True
        cause = error.__cause__ or getattr(error, "reason", None)  # urllib keeps the cause there
        if not isinstance(cause, BaseException):
            return False
        error = cause
    return False


def _status(error: BaseException) -> object:
    """Return the HTTP status of an exception.

    openai and requests call it status_code, aiohttp status, urllib code.
    """
    where = (error, getattr(error, "response", None))
    found = (getattr(one, key, None) for one in where for key in ("status_code", "status", "code"))
    return next((status for status in found if isinstance(status, int)), None)


class RetrySchedule:
    """Retry schedule of all functions of a run. Thread-safe."""

    def __init__(self, unreachable_s: float) -> None:
        self._unreachable_s = unreachable_s
        self._lock = threading.Lock()
        self._waited_for: set[str] = set()

    def again_in_s(self, name: str, unreached_since: float, num_calls: int, problem: str) -> float | None:
        """Return the seconds until a retry, or None if the function has failed.

        `num_calls`: calls so far that did not reach its service.
        """
        left_s = unreached_since + self._unreachable_s - time.monotonic()
        if left_s <= 0:
            return None
        with self._lock:
            is_new = name not in self._waited_for
            self._waited_for.add(name)
        if is_new:
            log.warning(
                "reward function %s cannot reach its service: it %s; retrying for up to %g s while the run waits "
                "(learner.reward.unreachable_s)", name, problem, self._unreachable_s,
            )  # fmt: skip
        return min(FIRST_S * 2 ** (num_calls - 1), LONGEST_S, left_s)

    def record_reached(self, name: str) -> None:
        with self._lock:
            was_waited_for = name in self._waited_for
            self._waited_for.discard(name)
        if was_waited_for:
            log.info("reward function %s reaches its service again", name)
