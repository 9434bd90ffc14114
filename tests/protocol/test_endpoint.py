"""IPv4 and IPv6 addresses: parsing, and rejection with a reason."""

import pytest

from protocol.endpoint import check_endpoint, exposure, join_address, needs_ipv6, split_endpoint
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://127.0.0.1:5757", "127.0.0.1", "5757"),
        ("tcp://*:*", "*", "*"),
        ("tcp://node7.example:0", "node7.example", "0"),
        ("tcp://node7.example.:1", "node7.example.", "1"),
        ("tcp://gpu_1:5757", "gpu_1", "5757"),  # Docker Compose permits it
        ("tcp://eth0.100:5757", "eth0.100", "5757"),  # a server may listen at an interface
        ("tcp://[::1]:5757", "::1", "5757"),
        ("tcp://[::]:*", "::", "*"),
        ("tcp://[fd00::7]:65535", "fd00::7", "65535"),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, host: str, port: str) -> None:
    assert split_endpoint(endpoint) == (host, port)
    if port.isdigit():
        assert f"tcp://{join_address(host, int(port))}" == endpoint


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("127.0.0.1:5757", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:²", "expected tcp://HOST:PORT"),
        (f"tcp://127.0.0.1:{'9' * 5000}", "expected tcp://HOST:PORT"),
        ("tcp://:5757", "expected tcp://HOST:PORT"),
        ("tcp://[::1]", "expected tcp://HOST:PORT"),
        ("tcp://::1:5757", r"without brackets; .*tcp://\[::1\]:5757"),
        ("tcp://[node7]:5757", r"'\[node7\]' is not an IPv6 address"),
        ("tcp://gpu-1 :5757", "'gpu-1 ' is neither a host name nor an IP address"),
        ("tcp://10.0.0.5/24:5757", "is neither a host name nor an IP address"),
        ("tcp://a..b:5757", "is neither a host name nor an IP address"),
        (f"tcp://{'a' * 64}:5757", "is neither a host name nor an IP address"),
        ("tcp://höst:5757", "is neither a host name nor an IP address"),
        ("tcp://[fe80::1%eth0]:5757", "is link-local, so it means another machine on every link"),
    ],
)
def test_an_invalid_endpoint_is_rejected_with_its_value(endpoint: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        check_endpoint(endpoint, has_keys=True, insecure=False)
    assert f"endpoint = {endpoint!r} " in str(refused.value)


OWN = ["127.0.0.1", "127.8.9.1", "[::1]", "localhost"]
OPEN = ["0.0.0.0", "*", "10.0.0.5", "[::]", "[fd00::7]", "127.0.0.1.evil.example", "localhost.example"]


def test_only_loopback_needs_neither_keys_nor_explicit_consent() -> None:
    for endpoint in (f"tcp://{host}:5757" for host in OWN):
        check_endpoint(endpoint, has_keys=False, insecure=False)
    for endpoint in (f"tcp://{host}:5757" for host in OPEN):
        with pytest.raises(ConfigError, match="is open to other machines"):
            check_endpoint(endpoint, has_keys=False, insecure=False)
        check_endpoint(endpoint, has_keys=True, insecure=False)
        check_endpoint(endpoint, has_keys=False, insecure=True)


@pytest.mark.parametrize("endpoint", ["tcp://*:5757", "tcp://10.0.0.5:*"])
def test_a_learner_cannot_connect_to_a_listen_address(endpoint: str) -> None:
    check_endpoint(endpoint, has_keys=True, insecure=False)
    with pytest.raises(ConfigError, match="is a listen address, not the address of a server"):
        check_endpoint(endpoint, has_keys=True, insecure=False, connects=True)


def test_remaining_risks_are_logged_for_every_address_except_loopback() -> None:
    assert exposure("tcp://127.0.0.1:5757", has_keys=False) is None
    with_keys, without = (exposure("tcp://10.0.0.5:5757", has_keys=has_keys) for has_keys in (True, False))
    assert with_keys is not None and "listed keys only" in with_keys and "neither encrypted" in with_keys
    assert without is not None and "anyone who reaches" in without and "neither encrypted" in without


def test_ipv6_is_used_only_without_another_address() -> None:
    assert needs_ipv6("::1") and needs_ipv6("::")
    assert not any(needs_ipv6(host) for host in ("127.0.0.1", "localhost", "*", "no.such.host."))
