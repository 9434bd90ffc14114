"""Containment of unexpected exceptions: each affects only the request that raised it.

    request ─▶ run_contained(work, …) ─┬▶ done
                                       └▶ unexpected exception ─▶ logged ─▶ `fail` notifies the peer
    loop ─▶ with log_unexpected(…) ─▶ the next message or iteration

Invariant: only EngineDead (see supervisor.py) and cancellation propagate.
"""

import contextlib
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from inference_server.engine.interface import EngineDead

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 60.0
"""Minimum seconds between two tracebacks of the same exception at the same line."""

Fail = Callable[[str], Awaitable[object]]
"""Notifies the peer of the reason why its request failed."""


class _Report(msgspec.Struct):
    """Latest report of one exception type at one line of the code."""

    at: float
    num_since: int = 0


_reports: dict[tuple[type[Exception], str, int | None], _Report] = {}


async def run_contained(work: Awaitable[object], doing: str, fail: Fail | None = None) -> None:
    """Await the work of one request, and report an unexpected exception to the peer.

    Raises:
        EngineDead: The engine has died.
    """
    try:
        await work
    except EngineDead:
        raise
    except Exception as error:
        record_unexpected(error, doing)
        if fail is not None:
            with log_unexpected(f"notifying the peer that {doing} failed"):
                await fail(describe(error))


@contextlib.contextmanager
def log_unexpected(doing: str) -> Iterator[None]:
    """Log an unexpected exception of one loop iteration. EngineDead propagates."""
    try:
        yield
    except EngineDead:
        raise
    except Exception as error:
        record_unexpected(error, doing)


def record_unexpected(error: Exception, doing: str) -> None:
    """Log an unexpected exception with its traceback, at most once a minute per line."""
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    key = (type(error), frame.filename, frame.lineno) if frame else (type(error), "", None)
    now, report = time.monotonic(), _reports.get(key)
    if report is not None and now - report.at < REPORT_INTERVAL_S:
        report.num_since += 1
        return
    again = f" ({report.num_since} more since the last report)" if report is not None and report.num_since else ""
    log.error(
        "unexpected %s while %s%s; the server continues, please report this traceback",
        type(error).__name__, doing, again, exc_info=error,
    )  # fmt: skip
    _reports[key] = _Report(now)


def describe(error: Exception) -> str:
    """Return the error message for the peer."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"unexpected {what}; its traceback is in the server's log"
