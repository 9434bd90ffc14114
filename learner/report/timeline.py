"""The story of a run besides its steps: when it began or went on, which servers came, went and came back.

    leader.py, the fleet's changes of state ─▶ timeline.jsonl ─▶ "What happened" in the report

Invariant: nobody who tells stops a run: what the disk does not take costs the line and a warning.
"""

import json
import logging
import time
from pathlib import Path

import msgspec

from learner.storage.disk import DiskError
from learner.storage.lines import Lines, ends_of

log = logging.getLogger(__name__)

SHOWN_BYTES = 16 << 10
"""At each end of a story that is longer."""


class Event(msgspec.Struct, frozen=True):
    """One line of the file; `time` in seconds since 1970."""

    time: float
    what: str


class Timeline:
    """Appends events, from one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def note(self, what: str) -> None:
        try:
            self._lines.append({"time": time.time(), "what": what})
        except DiskError as error:
            log.warning("not told in the report: %s (%s)", what, error)

    def close(self) -> None:
        self._lines.close()


def read_events(path: Path) -> list[Event]:
    """In the order of the file, of a long one the ends; lines that are none are left out."""
    if not path.is_file():
        return []
    events = []
    for line in ends_of(path, SHOWN_BYTES):
        try:
            events.append(msgspec.convert(json.loads(line), Event))
        except (ValueError, msgspec.ValidationError):  # the torn last line of a killed writer
            continue
    return events
