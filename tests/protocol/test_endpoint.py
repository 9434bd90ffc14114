"""Addresses of both kinds: what is taken apart, what is refused and why."""

import pytest

from protocol.endpoint import check_endpoint, join_address, needs_ipv6, split_endpoint
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("tcp://127.0.0.1:5757", "127.0.0.1", "5757"),
        ("tcp://*:*", "*", "*"),
        ("tcp://node7.example:0", "node7.example", "0"),
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
        ("tcp://127.0.0.1", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:²", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1:٣", "expected tcp://HOST:PORT"),
        (f"tcp://127.0.0.1:{'9' * 5000}", "expected tcp://HOST:PORT"),
        ("tcp://:5757", "expected tcp://HOST:PORT"),
        ("tcp://[::1]", "expected tcp://HOST:PORT"),
        ("tcp://::1:5757", r"without brackets; .*tcp://\[::1\]:5757"),
        ("tcp://fd00::7:5757", "without brackets"),
        ("tcp://[::1:5757", "without brackets"),
        ("tcp://[[::1]]:5757", "is not an IPv6 address"),
        ("tcp://[node7]:5757", r"'\[node7\]' is not an IPv6 address"),
        ("tcp://[127.0.0.1]:5757", "is not an IPv6 address"),
        ("tcp://[fe80::1%eth0]:5757", "is link-local, so it means another machine on every link"),
    ],
)
def test_what_is_no_endpoint_is_refused_with_what_came(endpoint: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        check_endpoint(endpoint, has_keys=True, insecure=False)
    assert f"endpoint = {endpoint!r} " in str(refused.value)


def test_an_ipv6_address_beyond_loopback_needs_keys() -> None:
    check_endpoint("tcp://[::1]:5757", has_keys=False, insecure=False)
    for endpoint in ("tcp://[::]:5757", "tcp://[fd00::7]:5757"):
        with pytest.raises(ConfigError, match="is open to other machines"):
            check_endpoint(endpoint, has_keys=False, insecure=False)


@pytest.mark.parametrize(
    ("host", "needed"),
    [("::1", True), ("::", True), ("127.0.0.1", False), ("localhost", False), ("*", False), ("no.such.host.", False)],
)
def test_only_what_has_no_other_address_is_reached_by_ipv6(host: str, needed: bool) -> None:
    assert needs_ipv6(host) is needed
