"""The address at which server and learner meet, and what may stand at one that leaves the machine.

Loopback is open to the processes of the machine. Every other address needs keys, or `insecure = true` said aloud;
config.py refuses the rest before anything is loaded, channel/sockets.py before anything is bound or connected.
"""

import ipaddress

from protocol.errors import ConfigError


def check_endpoint(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise ConfigError for what is not tcp://HOST:PORT, and for an address beyond loopback without keys."""
    if not is_loopback(_host(endpoint)) and not has_keys and not insecure:
        raise ConfigError(
            f"endpoint = {endpoint!r} leaves this machine, and without keys anyone there could act as the learner or the "
            'server. Make keys with `make keys` and set keys = "keys" on both sides, or say insecure = true'
        )


def exposure(endpoint: str, *, has_keys: bool) -> str | None:
    """What is open at this endpoint, in one sentence for the log; None on loopback."""
    if is_loopback(_host(endpoint)):
        return None
    weights = "The bytes of the weights travel beside it, neither encrypted nor authenticated: use a private network"
    if has_keys:
        return f"{endpoint} is encrypted and open to listed keys only. {weights} (SECURITY.md)"
    return f"insecure = true: anyone who reaches {endpoint} can act as the learner. {weights} (SECURITY.md)"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as another machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host(endpoint: str) -> str:
    host_and_port = endpoint.removeprefix("tcp://")
    host, _, port = host_and_port.rpartition(":")
    if host_and_port == endpoint or not host or not (port == "*" or (port.isdigit() and int(port) < 65536)):
        raise ConfigError(f"endpoint is {endpoint!r}; expected tcp://HOST:PORT, for example tcp://127.0.0.1:5757")
    return host
