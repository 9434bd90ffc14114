"""Keep an unexpected exception to the request that raised it; the server and all other requests go on.

    a request ─▶ contained(work, …) ─┬▶ done
                                     └▶ unexpected exception ─▶ traceback in the log ─▶ `fail` tells the peer
    a loop ─▶ with survived(…) ─▶ the next message, the next look

Invariant: only EngineDead, whose meaning is life.py's, and a cancellation get past these.
"""

import contextlib
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from inference_server.engine.interface import EngineDead

log = logging.getLogger(__name__)

NOTE_INTERVAL_S = 60.0
"""Between two tracebacks of the same exception at the same place."""

Fail = Callable[[str], Awaitable[object]]
"""Tells the peer why its request failed."""


class _Noted(msgspec.Struct):
    """One kind of exception at one place of the code."""

    at: float
    num_since: int = 0


_noted: dict[tuple[type[Exception], str, int | None], _Noted] = {}


async def contained(work: Awaitable[object], doing: str, fail: Fail | None = None) -> None:
    """Await the work of one request; log an unexpected exception and tell it to the peer. Raises EngineDead."""
    try:
        await work
    except EngineDead:
        raise
    except Exception as error:
        note(error, doing)
        if fail is not None:
            with survived(f"telling the peer that {doing} failed"):
                await fail(in_words(error))


@contextlib.contextmanager
def survived(doing: str) -> Iterator[None]:
    """Log an unexpected exception of one turn of a loop. Raises EngineDead."""
    try:
        yield
    except EngineDead:
        raise
    except Exception as error:
        note(error, doing)


def note(error: Exception, doing: str) -> None:
    """Log an unexpected exception with its traceback, at most once a minute for each place that raises it."""
    place = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    key = (type(error), place.filename, place.lineno) if place else (type(error), "", None)
    now, noted = time.monotonic(), _noted.get(key)
    if noted is not None and now - noted.at < NOTE_INTERVAL_S:
        noted.num_since += 1
        return
    again = f" ({noted.num_since} more since the last report)" if noted is not None and noted.num_since else ""
    log.error(
        "unexpected %s while %s%s; the server goes on, please report this traceback",
        type(error).__name__, doing, again, exc_info=error,
    )  # fmt: skip
    _noted[key] = _Noted(now)


def in_words(error: Exception) -> str:
    """What a peer is told."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"unexpected {what}; its traceback is in the server's log"
