"""Address at which server and learner meet, the rules of access to it, and headers of HTTP responses.

    tcp://HOST:PORT      HOST: a name, an IPv4 address, `*` (IPv4 only), or IPv6 in brackets, [::] for both

Loopback is open to the processes of the machine. Every other address needs keys or an explicit `insecure`.
config.py refuses other addresses before anything is loaded. channel/sockets.py refuses them before it binds
or connects.

The headers name the policy behind a response of the OpenAI API. inference_server/http.py writes them, and
learner/evaluation reads them. They carry the run and the versions of the oldest and the newest token.
"""

import ipaddress
import re
import socket
from urllib.parse import quote

from protocol.errors import ConfigError

NO_VERSION = -1
"""Version of the model's own weights, before the first weight sync. /metrics uses it too."""
START, END = "X-Slipstream-Policy-Version-Start", "X-Slipstream-Policy-Version-End"
RUN = "X-Slipstream-Run"
"""Run whose weights answered. Two runs, separated by a comma: the weights of another run arrived during the
response. Absent: the weights belong to no run."""
_LABEL = r"[A-Za-z0-9_-]{1,63}"
HOST_NAME = re.compile(rf"(?=[A-Za-z0-9]){_LABEL}(\.{_LABEL})*\.?")
"""Names that both ZeroMQ and the resolver accept, also those of containers and of interfaces."""


def check_endpoint(endpoint: str, *, has_keys: bool, insecure: bool, connects: bool = False) -> None:
    """Check the form of an endpoint, and its protection beyond loopback. `connects`: a learner connects to it.

    Raises:
        ConfigError: It is not tcp://HOST:PORT, cannot be connected to, or is beyond loopback without keys or
            `insecure`.
    """
    host, port = split_endpoint(endpoint)
    if connects and "*" in (host, port):
        raise ConfigError(
            f"endpoint = {endpoint!r} is a listen address, not the address of a server; set it to the server's own "
            "name and port, for example tcp://gpu-1:5757"
        )
    if not is_loopback(host) and not has_keys and not insecure:
        raise ConfigError(
            f"endpoint = {endpoint!r} is open to other machines, and without keys anyone there could act as the "
            'learner or the server. Create keys with `slipstream keys keys` and set keys = "keys" on both sides, or '
            "set insecure = true"
        )


def exposure(endpoint: str, *, has_keys: bool) -> str | None:
    """Return one log sentence about what the endpoint exposes, or None on loopback."""
    if is_loopback(split_endpoint(endpoint)[0]):
        return None
    weights = "Weights travel over separate connections, neither encrypted nor authenticated: use a private network"
    if has_keys:
        return f"{endpoint} is encrypted and accepts listed keys only. {weights} (SECURITY.md)"
    return f"insecure = true: anyone who reaches {endpoint} can act as the learner. {weights} (SECURITY.md)"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`.

    A name other than localhost counts as another machine.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return host, without brackets, and port, a number or `*`.

    Raises:
        ConfigError: The endpoint is not tcp://HOST:PORT, or its host is invalid or link-local.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port == "*" or is_port_number(port)
    if not endpoint.startswith("tcp://") or not host or not is_port:
        raise ConfigError(
            f"endpoint = {endpoint!r} is not valid; expected tcp://HOST:PORT, for example tcp://127.0.0.1:5757 or "
            "tcp://[::1]:5757"
        )
    if ":" in host or "[" in host or "]" in host:
        host = _ipv6(host, endpoint)
    elif host != "*" and not is_host(host):
        raise ConfigError(
            f"endpoint = {endpoint!r} is not valid: {host!r} is neither a host name nor an IP address; correct it"
        )
    return host, port


def is_host(text: str) -> bool:
    """Return whether a text is a host name or an IP address, without brackets."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return HOST_NAME.fullmatch(text) is not None
    return True


def is_port_number(text: str) -> bool:
    """Return whether a text is a port number in ASCII digits.

    `str.isdigit` alone also accepts ² and ٣.
    """
    return len(text) <= 5 and text.isascii() and text.isdigit() and int(text) < 65536


def join_address(host: str, port: int) -> str:
    """Join host and port, with brackets for IPv6: 127.0.0.1:5757, [::1]:5757."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def needs_ipv6(host: str) -> bool:
    """Return whether a host can be reached by IPv6 only.

    A name with addresses of both kinds is reached by IPv4.
    """
    if ":" in host:
        return True
    try:
        families = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # `*`, an interface name, or a name that is not known yet
        return False
    return families == {socket.AF_INET6}


def header_of_runs(*runs: str | None) -> dict[str, str]:
    """Return the header that names these runs, which may be equal.

    Names are percent-encoded where a header cannot hold them.
    """
    names = dict.fromkeys(quote(run) for run in runs if run is not None)
    return {RUN: ", ".join(names)} if names else {}


def _ipv6(host: str, endpoint: str) -> str:
    address = host.removeprefix("[").removesuffix("]")
    try:
        is_link_local = ipaddress.IPv6Address(address).is_link_local
    except ValueError as error:
        raise ConfigError(
            f"endpoint = {endpoint!r} is not valid: {host!r} is not an IPv6 address; expected tcp://[ADDRESS]:PORT, "
            "for example tcp://[::1]:5757"
        ) from error
    if host != f"[{address}]":
        raise ConfigError(
            f"endpoint = {endpoint!r} has an IPv6 address without brackets; expected tcp://[ADDRESS]:PORT, for example "
            "tcp://[::1]:5757"
        )
    if is_link_local:
        raise ConfigError(
            f"endpoint = {endpoint!r} is link-local, so it means another machine on every link; use an address outside "
            "fe80::/10"
        )
    return address
