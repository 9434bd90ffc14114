"""Why connections fail before their first message, and when they break: what libzmq tells a socket's monitor, in words."""

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


class FailedHandshakes:
    """Collects the failed handshakes of one socket from now on; `take` returns the new ones."""

    def __init__(self, context: zmq.Context[Any], watched: zmq.Socket[Any]) -> None:
        address = f"inproc://failed-handshakes-{id(watched)}"
        watched.monitor(address, _HANDSHAKES | zmq.EVENT_DISCONNECTED)
        self._events = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        # Without a limit: at one, libzmq's own thread would wait for the reader, and with it every connection.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        self.num_broken = 0
        """Connections that were up and have ended, as of the last `take`."""

    def take(self) -> list[Failure]:
        failures = []
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self.num_broken += 1
            else:
                failures.append(_failure(event["event"], event["value"]))
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
