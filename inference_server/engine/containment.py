"""Keep an unexpected exception to the request that raised it; the server and all other requests go on.

    a request ─▶ run_contained(work, …) ─┬▶ done
                                         └▶ unexpected exception ─▶ traceback in the log ─▶ `fail` tells the peer
    a loop ─▶ with log_unexpected(…) ─▶ the next message, the next look

Invariant: only EngineDead, whose meaning is supervisor.py's, and a cancellation get past these.
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
"""Between two tracebacks of the same exception at the same place."""

Fail = Callable[[str], Awaitable[object]]
"""Tells the peer why its request failed."""


class _Report(msgspec.Struct):
    """One kind of exception at one place of the code."""

    at: float
    num_since: int = 0


_reports: dict[tuple[type[Exception], str, int | None], _Report] = {}


async def run_contained(work: Awaitable[object], doing: str, fail: Fail | None = None) -> None:
    """Await the work of one request; log an unexpected exception and tell it to the peer. Raises EngineDead."""
    try:
        await work
    except EngineDead:
        raise
    except Exception as error:
        record_unexpected(error, doing)
        if fail is not None:
            with log_unexpected(f"telling the peer that {doing} failed"):
                await fail(describe(error))


@contextlib.contextmanager
def log_unexpected(doing: str) -> Iterator[None]:
    """Log an unexpected exception of one turn of a loop. Raises EngineDead."""
    try:
        yield
    except EngineDead:
        raise
    except Exception as error:
        record_unexpected(error, doing)


def record_unexpected(error: Exception, doing: str) -> None:
    """Log an unexpected exception with its traceback, at most once a minute for each place that raises it."""
    place = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    key = (type(error), place.filename, place.lineno) if place else (type(error), "", None)
    now, report = time.monotonic(), _reports.get(key)
    if report is not None and now - report.at < REPORT_INTERVAL_S:
        report.num_since += 1
        return
    again = f" ({report.num_since} more since the last report)" if report is not None and report.num_since else ""
    log.error(
        "unexpected %s while %s%s; the server goes on, please report this traceback",
        type(error).__name__, doing, again, exc_info=error,
    )  # fmt: skip
    _reports[key] = _Report(now)


def describe(error: Exception) -> str:
    """What a peer is told."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"unexpected {what}; its traceback is in the server's log"
