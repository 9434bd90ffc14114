"""The events that the processes of a run have recorded so far, ordered by the machine's monotonic clock.

    one event file per directory (written by traps.py) ─▶ Events ─▶ supervisor.py, stops.py

Invariant: an event of a server, or about a server, has the number of that server.
"""

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.chaos.traps import Event


class Events:
    """The events of one run. `server_of_port`: server numbers by the port that the learner uses."""

    def __init__(self, files: Mapping[Path, int], server_of_port: Mapping[int, int]) -> None:
        """`files`: event files, each with the number of the server that writes it."""
        self._files, self._server_of_port = files, server_of_port
        self._num_bytes_read = dict.fromkeys(files, 0)
        self._all: list[Event] = []
        self.num_steps = 0
        """Highest step that the learner has finished."""
        self.last_step = 0
        """Step that the learner finished last. Lower than `num_steps` after a resume."""
        self.ready: set[int] = set()
        """Servers that the learner may request groups from."""

    def read(self) -> list[Event]:
        """Return all events so far."""
        new = [event for path, server in self._files.items() for event in self._read(path, server)]
        if new:
            new.sort(key=_time_s)
            is_in_order = not self._all or self._all[-1].time_s <= new[0].time_s
            self._all += new
            if not is_in_order:  # a file was read before an earlier event reached another file
                self._all.sort(key=_time_s)
            for event in new:
                self._note(event)
        return self._all

    def _read(self, path: Path, server: int) -> list[Event]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._num_bytes_read[path])
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._num_bytes_read[path] += sum(map(len, whole))
        events = [msgspec.json.decode(line, type=Event) for line in whole]
        return [msgspec.structs.replace(event, server=self._server_of(event, server)) for event in events]

    def _server_of(self, event: Event, writer: int) -> int | None:
        if event.process != "learner":
            return writer
        return self._server_of_port.get(event.number) if event.name.startswith("server ") else None

    def _note(self, event: Event) -> None:
        match event.process, event.name:
            case "learner", "started":
                self.ready.clear()
            case "learner", "consumed":
                self.num_steps, self.last_step = max(self.num_steps, event.number), event.number
            case "learner", "server ready" if event.server is not None:
                self.ready.add(event.server)
            case "learner", "server joining" | "server syncing" | "server draining" | "server gone":
                self.ready.discard(-1 if event.server is None else event.server)


def since(events: Sequence[Event], time_s: float) -> Sequence[Event]:
    """Return the events after `time_s`."""
    return events[bisect.bisect_right(events, time_s, key=_time_s) :]


def _time_s(event: Event) -> float:
    return event.time_s
