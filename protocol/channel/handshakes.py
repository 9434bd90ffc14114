"""What libzmq tells a socket's monitor: why handshakes fail, which connections are up, and when they break."""

from enum import Enum
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message


class Failure(Enum):
    """What went wrong in a handshake, as far as this side can know."""

    UNKNOWN_KEY = "a key that is not in the server's allowed/"
    OTHER_MECHANISM = "keys on one side only"
    OTHER_SERVER_KEY = "a server.pub that is another server's"
    BROKEN_OFF = "broken off"


_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Monitor:
    """What happens to the connections of one socket from now on; `take` returns the handshakes that have newly failed."""

    def __init__(self, context: zmq.Context[Any], watched: zmq.Socket[Any]) -> None:
        address = f"inproc://monitor-{id(watched)}"
        watched.monitor(address, _HANDSHAKES | zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events = context.socket(zmq.PAIR)
        # Without a limit: at one, libzmq's own thread would wait for the reader, and with it every connection.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        self._failures: list[Failure] = []
        self.num_broken = 0
        """Connections that were up and have ended, as of the last `read`."""
        self.descriptors: set[int] = set()
        """Of the connections that are up, as of the last `read`. ZeroMQ may have closed one since."""

    def read(self) -> None:
        """Take note of what has happened since."""
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            match event["event"]:
                case zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED:
                    self.descriptors.add(event["value"])
                case zmq.EVENT_DISCONNECTED:
                    self.num_broken += 1
                    self.descriptors.discard(event["value"])
                case failed:
                    self._failures.append(_failure(failed, event["value"]))

    def take(self) -> list[Failure]:
        self.read()
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Call it after the watched socket is closed, which ends the monitoring: an event without a reader would wait."""
        self._events.close(linger=0)


def _failure(event: int, value: int) -> Failure:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure.UNKNOWN_KEY
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return Failure.OTHER_SERVER_KEY
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Failure.OTHER_MECHANISM
    return Failure.BROKEN_OFF
