"""The HTTP port is taken at IPv4 and IPv6 addresses alike, and what cannot be taken is told with what to do."""

import socket

import pytest

from inference_server.config import ServerConfig
from inference_server.http_access import address_of, listen
from protocol.errors import ConfigError
from tests.ports import free_port


@pytest.mark.parametrize(
    ("host", "asked_at", "address"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["127.0.0.1"], "localhost"),
        ("0.0.0.0", ["127.0.0.1"], "0.0.0.0"),
        ("::1", ["::1"], "[::1]"),
        ("[::1]", ["::1"], "[::1]"),
        ("::", ["::1", "127.0.0.1"], "[::]"),
    ],
)
def test_an_address_of_either_kind_is_bound_and_answers(host: str, asked_at: list[str], address: str) -> None:
    config = ServerConfig(http_host=host, http_port=free_port())
    listener = listen(config)
    assert listener is not None
    with listener:
        for caller in asked_at:
            with (
                socket.create_connection((caller, config.http_port), timeout=5) as asking,
                listener.accept()[0] as asked,
            ):
                asked.sendall(b"here")
                assert asking.recv(4) == b"here"
    assert address_of(config) == f"{address}:{config.http_port}"


def test_port_0_turns_http_off() -> None:
    assert listen(ServerConfig(http_port=0)) is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("203.0.113.7", "Cannot assign requested address. Set server.http_host to an address of this machine"),
        ("nowhere.invalid", "Correct server.http_host"),
        ("::1::2", "Correct server.http_host"),
        ("a" * 300, "Correct server.http_host"),
        ("²", "Set server.http_host to an address of this machine"),  # a name of DNS is normalized, here to 0.0.0.2
        ("http://127.0.0.1", "Correct server.http_host"),
    ],
)
def test_an_address_that_cannot_be_taken_is_reported_with_what_to_do(host: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        listen(ServerConfig(http_host=host, http_port=free_port()))
    assert f"(server.http_host = {host!r})" in str(refused.value) and expected in str(refused.value)


def test_a_port_that_others_hold_names_the_port() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as held:
        port = held.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot listen on \[::1\]:{port} .*Address already in use\. Stop the process"
        ):
            listen(ServerConfig(http_host="::1", http_port=port))
