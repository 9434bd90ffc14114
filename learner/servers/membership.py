"""The servers of a run: which ones exist, the state of each, and which one is used next.

    file:servers.txt       one endpoint per line; # starts a comment
    dns:servers:5757       every IPv4 address of the name (Kubernetes headless service), else every IPv6 one

    joining ─ welcomed ─▶ syncing ─ sync published ─▶ ready ─ unlisted, or shutting down ─▶ draining ─▶ gone
       ▲                     │ lost, or sync failed     │                                              ▲
       └─────────────────────┴──────────────────────────┘    any state, if it does not fit this run ───┘

Invariants: a source that cannot be read or lists no server changes nothing, so a name server restart never
removes all servers. A member's state is derived from what is known about it, so nothing can contradict it.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from learner.servers.link import ServerLink
from protocol.endpoint import check_endpoint, is_host, is_port_number, join_address
from protocol.errors import ConfigError
from protocol.messages import Welcome

log = logging.getLogger(__name__)
MemberState = Literal["joining", "syncing", "ready", "draining", "gone"]
STICKY_MARGIN = 2
"""Extra requests, relative to the least loaded server, up to which an episode stays at its server."""


class EndpointSource:
    """Reader of one source of endpoints, usable from any thread."""

    def __init__(self, source: str, *, has_keys: bool, insecure: bool) -> None:
        """Read the source. Raises ConfigError if it is invalid or lists no server."""
        self._source, self._has_keys, self._insecure = source, has_keys, insecure
        self._problem: str | None = None
        self.endpoints = self._read()
        """Endpoints of the last successful read."""

    def reread(self) -> tuple[str, ...]:
        """Read the source again. An error is logged once and keeps the endpoints."""
        try:
            self.endpoints, self._problem = self._read(), None
        except ConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("%s; keeping the current servers", error)
        return self.endpoints

    def _read(self) -> tuple[str, ...]:
        kind, _, location = self._source.partition(":")
        match kind:
            case "file":
                endpoints = _of_file(location)
            case "dns":
                endpoints = _of_name(location)
            case _:
                raise ConfigError(
                    f"endpoints_from = {self._source!r} is not a source; use file:PATH (one endpoint per line) or "
                    "dns:NAME:PORT"
                )
        if not endpoints:
            raise ConfigError(f"endpoints_from = {self._source!r} lists no server; add at least one endpoint")
        for endpoint in endpoints:
            check_endpoint(endpoint, has_keys=self._has_keys, insecure=self._insecure, connects=True)
        return endpoints


def _of_file(path: str) -> tuple[str, ...]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"endpoints_from: the file {path} cannot be read: {error}; restore it, or name another source"
        ) from error
    return tuple(dict.fromkeys(endpoint for line in lines if (endpoint := line.partition("#")[0].strip())))


def _of_name(location: str) -> tuple[str, ...]:
    name, _, port = location.rpartition(":")
    if not is_host(name) or not is_port_number(port):
        raise ConfigError(
            f"endpoints_from = 'dns:{location}' is not a source; use dns:NAME:PORT, for example dns:servers:5757"
        )
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"endpoints_from: the name {name} has no address: {error}; add it to DNS, or name another source"
        ) from error
    families = {family for family, *_ in found}
    # A server with addresses of both families is only one server.
    chosen = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    hosts = sorted({str(address[0]) for family, *_, address in found if family == chosen})
    return tuple(f"tcp://{join_address(host, int(port))}" for host in hosts)


class Member:
    """Server of the fleet. Only fleet.py changes it, in its loop.

    Any thread may read it.
    """

    def __init__(self, endpoint: str, link: ServerLink) -> None:
        self.endpoint, self.link = endpoint, link
        self.task: asyncio.Task[None] | None = None
        """Task that keeps the link up."""
        self.served: tuple[str, int] | None = None
        """Server id and version of the last publication that included this server."""
        self.chosen_at = 0
        """Number of the fleet's choices when this server was last chosen."""
        self.is_unlisted = self.is_gone = False
        self.noted_state: MemberState = "joining"
        """State that was reported last."""

    @property
    def is_draining(self) -> bool:
        """True if the endpoint left the list or the server announced its shutdown."""
        return self.is_unlisted or self.link.is_draining

    @property
    def welcome(self) -> Welcome | None:
        """Welcome of the connected server, or None."""
        return self.link.welcome if self.link.connected else None

    def state(self, version: int | None) -> MemberState:
        """Return the state, given the version that was published last."""
        welcome = self.welcome
        if self.is_gone:
            return "gone"
        if self.is_draining:
            return "draining"
        if welcome is None:
            return "joining"
        return "ready" if self.served is not None and self.served == (welcome.server_id, version) else "syncing"


class Load(NamedTuple):
    """Load of a server. Smaller is freer."""

    num_groups: int
    """Number of pending groups and turns."""
    chosen_at: int
    """Number of the fleet's choices when this server was last chosen. 0: never."""


def least_loaded(loads: Sequence[Load], stays_at: int | None = None) -> int | None:
    """Return the index of the server to use, or None if there is none.

    This is the server with the fewest pending requests, and among equals the one chosen longest ago.
    `stays_at`: index of the server with the episode's KV cache, preferred up to STICKY_MARGIN more.
    """
    least = min(range(len(loads)), key=loads.__getitem__, default=None)
    if least is None or stays_at is None or loads[stays_at].num_groups > loads[least].num_groups + STICKY_MARGIN:
        return least
    return stays_at
