"""Which servers a run has when that may change: the endpoints in a file, or the addresses of a DNS name, read again and again.

    file:servers.txt       one endpoint a line; what follows a # is a remark
    dns:servers:5757       every IPv4 address that the name has now, at this port (a headless service of Kubernetes); without any, IPv6

Between the config and fleet.py. Invariant: what cannot be read, or names no server, changes nothing: a run never loses all its servers
to a name server that is restarted or a file that is being written.
"""

import logging
import socket
from pathlib import Path

from protocol.endpoint import check_endpoint, is_port_number, join_address
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


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
