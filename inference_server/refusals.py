"""What the server turns away: counted for /status, and told to the log at most once a minute, however much it is.

Invariant: whoever sends rubbish fills neither the memory nor the log.
"""

import logging
import time
from collections import Counter

from protocol.channel.handshakes import Failure

log = logging.getLogger(__name__)

NOTE_INTERVAL_S = 60.0


class Refusals:
    """Counts messages and handshakes that came to nothing."""

    def __init__(self) -> None:
        self.num_messages = self.num_handshakes = 0
        self._messages: Counter[str] = Counter()
        self._handshakes: Counter[str] = Counter()
        self._example = ""
        self._noted_at = -NOTE_INTERVAL_S

    def message(self, cause: str, example: str = "") -> None:
        """Count a message; `cause` is one of few, `example` says more about the newest."""
        self.num_messages += 1
        self._messages[cause] += 1
        if example:
            self._example = f"; the last of them: {example}"

    def handshakes(self, failures: Counter[Failure]) -> None:
        self.num_handshakes += failures.total()
        self._handshakes += Counter({failure.value: count for failure, count in failures.items()})

    def note(self) -> None:
        """Say what has come since the last note, unless that was less than a minute ago."""
        if not (self._messages or self._handshakes) or time.monotonic() - self._noted_at < NOTE_INTERVAL_S:
            return
        if self._handshakes:
            counts = ", ".join(f"{count} with {cause}" for cause, count in self._handshakes.most_common())
            log.warning("connections that failed in the handshake: %s (SECURITY.md)", counts)
        if self._messages:
            counts = ", ".join(f"{count} {cause}" for cause, count in self._messages.most_common())
            log.warning("messages refused: %s%s (SECURITY.md)", counts, self._example)
        self._messages.clear()
        self._handshakes.clear()
        self._example = ""
        self._noted_at = time.monotonic()
