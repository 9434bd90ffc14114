"""The servers of a run: which there are, the state of each, and which one is asked next.

    file:servers.txt       one endpoint a line; what follows a # is a remark
    dns:servers:5757       every IPv4 address that the name has now, at this port (a headless service of Kubernetes); without any, IPv6

    joining ─ welcomed ─▶ syncing ─ its push is published ─▶ ready ─ its endpoint is taken away, or it says so ─▶ draining ─▶ gone
       ▲                     │ lost, or a push failed          │                                                             ▲
       └─────────────────────┴─────────────────────────────────┘                    any state, if it does not fit this run ──┘

`least_loaded` picks the server that owes the fewest; for a later turn of an episode the one that has its KV cache, unless that has much
more to do. Of equals it picks the one that was chosen longest ago.

Between the config and fleet.py. Invariants: a source that cannot be read, or names no server, changes nothing, so a run never loses all
its servers to a name server that restarts; a member's state follows from what is known of it, so nothing can contradict it.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from learner.servers.link import ServerLink
from protocol.endpoint import check_endpoint, is_port_number, join_address
from protocol.errors import ConfigError
from protocol.messages import Welcome

log = logging.getLogger(__name__)
State = Literal["joining", "syncing", "ready", "draining", "gone"]
STICKY_MARGIN = 2
"""So many more requests than the freest server may it owe."""


class Membership:
    """Reads one source, from any thread."""

    def __init__(self, source: str, *, has_keys: bool, insecure: bool) -> None:
        """Raises ConfigError for what is neither a file nor a name, or names no server now."""
        self._source, self._has_keys, self._insecure = source, has_keys, insecure
        self._problem: str | None = None
        self.endpoints = self._read()
        """As they were read last."""

    def look(self) -> tuple[str, ...]:
        """Read again; a problem is told once and what was read before stays."""
        try:
            self.endpoints, self._problem = self._read(), None
        except ConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("%s; the servers stay those of before", error)
        return self.endpoints

    def _read(self) -> tuple[str, ...]:
        kind, _, place = self._source.partition(":")
        match kind:
            case "file":
                endpoints = _of_file(place)
            case "dns":
                endpoints = _of_name(place)
            case _:
                raise ConfigError(
                    f"endpoints_from = {self._source!r}; expected file:PATH (one endpoint a line) or dns:NAME:PORT"
                )
        if not endpoints:
            raise ConfigError(f"endpoints_from = {self._source!r} names no server now")
        for endpoint in endpoints:
            check_endpoint(endpoint, has_keys=self._has_keys, insecure=self._insecure)
        return endpoints


def _of_file(path: str) -> tuple[str, ...]:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"endpoints_from: the file {path} cannot be read: {error}") from error
    return tuple(dict.fromkeys(endpoint for line in lines if (endpoint := line.partition("#")[0].strip())))


def _of_name(place: str) -> tuple[str, ...]:
    name, _, port = place.rpartition(":")
    if not name or not is_port_number(port):
        raise ConfigError(f"endpoints_from = 'dns:{place}'; expected dns:NAME:PORT, for example dns:servers:5757")
    try:
        found = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"endpoints_from: the name {name} has no address: {error}") from error
    families = {family for family, *_ in found}
    chosen = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6  # a server that has both is one server
    hosts = sorted({str(address[0]) for family, *_, address in found if family == chosen})
    return tuple(f"tcp://{join_address(host, int(port))}" for host in hosts)


class Member:
    """Changed by fleet.py alone, in its loop; read from any thread."""

    def __init__(self, endpoint: str, link: ServerLink) -> None:
        self.endpoint, self.link = endpoint, link
        self.task: asyncio.Task[None] | None = None
        """Keeps the link up."""
        self.served: tuple[str, int] | None = None
        """Server id and version of what was published last with this server among those that have it."""
        self.chosen_at = 0
        """When it was last chosen, in choices of the fleet."""
        self.is_unlisted = self.is_gone = False
        self.noted_state: State = "joining"
        """The last one that was told."""

    @property
    def is_draining(self) -> bool:
        """Its endpoint was taken out of the list, or the server was told to end and has said so."""
        return self.is_unlisted or self.link.is_draining

    @property
    def welcome(self) -> Welcome | None:
        """What the server that is connected now has said; None while there is none."""
        return self.link.welcome if self.link.connected else None

    def state(self, version: int | None) -> State:
        """`version`: the one that was published last."""
        welcome = self.welcome
        if self.is_gone:
            return "gone"
        if self.is_draining:
            return "draining"
        if welcome is None:
            return "joining"
        return "ready" if self.served is not None and self.served == (welcome.server_id, version) else "syncing"


class Load(NamedTuple):
    """What a server has to do: smaller is freer."""

    num_groups: int
    """That it owes."""
    chosen_at: int
    """When it was last chosen, in choices; 0: never."""


def least_loaded(loads: Sequence[Load], stays_at: int | None = None) -> int | None:
    """Return the index of the server to ask, None if there is none; `stays_at`: of the one that gave the turn before."""
    least = min(range(len(loads)), key=loads.__getitem__, default=None)
    if least is None or stays_at is None or loads[stays_at].num_groups > loads[least].num_groups + STICKY_MARGIN:
        return least
    return stays_at
