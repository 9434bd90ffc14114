"""Check how far the doctor can reach a server: host name, port, handshake, answer.

A failed step yields a finding with the reason and the remedy.
"""

import asyncio
import ipaddress
import socket
import time
import uuid
from contextlib import suppress
from typing import TypeVar

from protocol.channel.keys import LearnerKeys
from protocol.channel.sockets import LearnerChannel
from protocol.doctor import Finding, in_one_line, ok, package_version, problem
from protocol.endpoint import join_address, split_endpoint
from protocol.errors import DeadlineExceeded, ProtocolError
from protocol.messages import Message, Probe, Pulse, Refused, ServerInfo, TrialResult

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 6.0
"""Twice the server's own timeout, so that the handshake is retried."""
ANSWER_TIMEOUT_S = 10.0
HANDSHAKE_CHECK_S = 0.25
M = TypeVar("M", ServerInfo, TrialResult)


class NotReached(Exception):
    """Failure to get an answer from a server, with the finding about it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def check_names(endpoint: str) -> Finding:
    """Check that the endpoint's host resolves to an address for connections."""
    host, _ = split_endpoint(endpoint)
    if _is_unspecified(host):
        return problem(
            "names", f"{endpoint} is a listen address, not the address of a server",
            "set `endpoint` to the server's name and port: --endpoint tcp://HOST:PORT",
        )  # fmt: skip
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return problem(
            "names", f"{host} does not resolve ({error.strerror or error})",
            "check the spelling of `endpoint`, add the name to DNS or /etc/hosts, or use the IP address",
        )  # fmt: skip
    return ok("names", f"{host} resolves to {', '.join(sorted(addresses))}")


def check_port(endpoint: str) -> Finding:
    """Check that the endpoint's port accepts connections."""
    host, port_text = split_endpoint(endpoint)
    where = join_address(host, int(port_text))
    try:
        socket.create_connection((host, int(port_text)), CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return problem(
            "port", f"nothing listens at {where}",
            "start `slipstream serve run.toml` there, or correct the port of `endpoint`; on another node, the server's "
            "`endpoint` must not be loopback",
        )  # fmt: skip
    except TimeoutError:
        return problem(
            "port", f"{where} did not answer within {CONNECT_TIMEOUT_S:g} s",
            f"correct the address in `endpoint`, or allow TCP port {port_text} in the firewalls between the nodes",
        )  # fmt: skip
    except OSError as error:
        return problem(
            "port", f"{where} cannot be reached ({error.strerror or error})",
            "correct the address in `endpoint`, or fix the route to that network",
        )  # fmt: skip
    return ok("port", f"{where} accepts connections")


async def ask(channel: LearnerChannel, keys: LearnerKeys | None) -> tuple[ServerInfo, float, float]:
    """Return the server's info, its clock's lead over ours, and the lead's error.

    Raises:
        HandshakeRefused: The keys do not match.
        NotReached: For any other reason.
    """
    await _send_first(channel, Probe(probe_id=uuid.uuid4().hex), keys)
    sent_s = time.time()
    server_info = await answer(channel, ServerInfo, ANSWER_TIMEOUT_S)
    slack_s = (time.time() - sent_s) / 2
    return server_info, server_info.clock_s - (sent_s + slack_s), slack_s


async def _send_first(channel: LearnerChannel, message: Message, keys: LearnerKeys | None) -> None:
    """Send the message as soon as the handshake has succeeded. Raises NotReached."""
    deadline, has_failed = time.monotonic() + HANDSHAKE_TIMEOUT_S, False
    while time.monotonic() < deadline:
        has_failed |= channel.check_handshake()
        with suppress(DeadlineExceeded):
            return await channel.send(message, HANDSHAKE_CHECK_S)
    if keys is not None and has_failed:
        # Either side notices different mechanisms first, and closes the connection.
        raise NotReached(problem(
            "keys",
            f"the peer at {channel.endpoint} closed every handshake: `server.pub` belongs to another server, or that "
            "server has no keys",
            "copy server.pub again from the server's key directory, or set the same `keys` on both sides",
        ))  # fmt: skip
    text = f"the peer at {channel.endpoint} does not respond like an inference server"
    raise NotReached(problem("port", text, "correct `endpoint`: use the server's port, not its HTTP port"))


async def answer(channel: LearnerChannel, kind: type[M], timeout_s: float) -> M:
    """Wait for a message of this kind. Raises NotReached."""
    try:
        async with asyncio.timeout(timeout_s):
            while isinstance(message := await channel.receive(), Pulse):
                pass
    except TimeoutError as error:
        text = f"the server did not answer within {timeout_s:g} s: it is loading its model, or it hangs"
        raise NotReached(problem("server", text, "wait until the server is ready, or restart it")) from error
    except ProtocolError as error:
        raise NotReached(_other_version(f"its answer cannot be decoded, {error}")) from error
    if isinstance(message, kind):
        return message
    reply = message.reason if isinstance(message, Refused) else type(message).__name__
    raise NotReached(_other_version(f"it does not know the request, {reply}"))


def _other_version(how: str) -> Finding:
    text = f"the server's slipstream-rl is not this learner's {package_version()}: {in_one_line(how)}"
    return problem("versions", text, "install the same version on both sides")


def _is_unspecified(host: str) -> bool:
    """Return whether the host is 0.0.0.0 or ::, which are only for listening."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
