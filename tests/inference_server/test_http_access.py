"""Access to the HTTP API with a small app: the port, at IPv4 and IPv6 addresses, the key, and the routes."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from inference_server.config import ServerConfig
from inference_server.http_access import (
    OPEN_PATHS,
    SERVED,
    ApiKeyGate,
    Kind,
    RouteGate,
    address_of,
    kind_of,
    listen,
    read_api_key,
)
from protocol.channel.keys import write_secret
from protocol.errors import ConfigError
from tests.inference_server.asgi import as_asked, ask, everything, status_behind
from tests.ports import free_port

KEY = "sk-of-this-test"
HEALTHY = {"unavailable": None, "policy_version": 3}
TORN = {"unavailable": "the weights are torn", "policy_version": 3}

# --- the port ---------------------------------------------------------------------------------------------------------


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
def test_ipv4_and_ipv6_addresses_are_bound_and_answer(host: str, asked_at: list[str], address: str) -> None:
    config = ServerConfig(http_host=host, http_port=free_port())
    listener = listen(config)
    assert listener is not None
    with listener:
        for caller in asked_at:
            with (
                socket.create_connection((caller, config.http_port), timeout=5) as asking,
                listener.accept()[0] as connection,
            ):
                connection.sendall(b"here")
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
        ("²", "Set server.http_host to an address of this machine"),  # DNS normalizes the name, here to 0.0.0.2
        ("http://127.0.0.1", "Correct server.http_host"),
    ],
)
def test_an_address_that_cannot_be_bound_is_reported_with_a_remedy(host: str, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        listen(ServerConfig(http_host=host, http_port=free_port()))
    assert f"(server.http_host = {host!r})" in str(refused.value) and expected in str(refused.value)


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as held:
        port = held.getsockname()[1]
        taken = rf"cannot listen on \[::1\]:{port} .*Address already in use\. Stop the process"
        with pytest.raises(ConfigError, match=taken):
            listen(ServerConfig(http_host="::1", http_port=port))


# --- the key ----------------------------------------------------------------------------------------------------------

GATE = ApiKeyGate(everything, KEY)
WRONG = ("", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Basic {KEY}", f"Bearer  {KEY}")


@pytest.mark.parametrize("path", ["/v1/models", "/", "/healthz", "/v1/health", "/metrics/../v1/models", "//health"])
def test_every_route_except_monitoring_and_preflight_requires_the_key(path: str) -> None:
    for method in ("GET", "POST"):
        assert status_behind(GATE, path, method) == 401
        assert {status_behind(GATE, path, method, authorization=wrong) for wrong in WRONG} == {401}
        for scheme in ("Bearer", "bearer"):
            assert status_behind(GATE, path, method, authorization=f"{scheme} {KEY}") == 200
        assert status_behind(GATE, path, method, **{"x-api-key": KEY}) == 200
        assert status_behind(GATE, path, method, **{"x-api-key": f"{KEY}x", "authorization": f"Basic {KEY}"}) == 401
    assert status_behind(GATE, path, "OPTIONS") == status_behind(GATE, "/metrics/") == 200


def test_the_key_is_read_from_a_private_file_or_vllms_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert read_api_key(ServerConfig(), insecure=False) is None
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment\n")
    assert read_api_key(ServerConfig(), insecure=False) == "of-the-environment"
    write_secret(tmp_path / "key", KEY)
    config = ServerConfig(api_key_file=str(tmp_path / "key"))
    assert read_api_key(config, insecure=False) == KEY
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"server\.api_key_file.* mode 644.*chmod 600"):
        read_api_key(config, insecure=False)


@pytest.mark.parametrize("key", [None, "", "\n"])
def test_http_beyond_loopback_needs_a_key_or_explicit_consent(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    for host in ("0.0.0.0", "", "10.0.0.5"):
        with pytest.raises(ConfigError, match=r"server\.http_host.*server\.api_key_file.*insecure = true"):
            read_api_key(ServerConfig(http_host=host), insecure=False)
    assert read_api_key(ServerConfig(http_host="0.0.0.0"), insecure=True) is None
    assert read_api_key(ServerConfig(http_host="0.0.0.0", http_port=0), insecure=False) is None


# --- the routes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "", "//v1/models", "/v1", "/v1/", "/v1/modelsx", "/V1/models", "/metricsx", "/metrics/x", "/health/x",
             "/v1/responses/a", "/v1/completions/x", "/v1/chat", "/v1/models\n"],
)  # fmt: skip
def test_lookalikes_of_a_route_are_not_served(path: str) -> None:
    assert kind_of(path) is None
    assert status_behind(RouteGate(everything, lambda: HEALTHY), path) == 404


def test_a_model_name_can_have_slashes_and_a_path_can_end_in_one() -> None:
    assert kind_of("/v1/models//tmp/a/model") is kind_of("/v1/models/org/model") is Kind.WORK
    assert kind_of("/metrics/") is Kind.MONITORING and kind_of("/v1/completions/") is Kind.WORK


def test_pending_requests_are_counted_without_monitoring() -> None:
    counted: list[int] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        counted.append(gate.num_open)
        await everything(scope, receive, send)

    gate = RouteGate(look, lambda: HEALTHY)
    for path in ("/v1/completions", "/health", "/status", "/tokenize"):
        status_behind(gate, path, "POST")
    assert counted == [1, 0, 0, 1] and gate.num_open == 0


def test_a_websocket_is_closed() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    asyncio.run(RouteGate(everything, lambda: HEALTHY)(scope, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_only_monitoring_is_answered_without_complete_weights() -> None:
    gate = RouteGate(everything, lambda: TORN)
    for path, kind in SERVED.items():
        status, headers, body = asyncio.run(ask(gate, as_asked(path), "POST"))
        assert (status == 200) == (kind is Kind.MONITORING), path
        if status != 200:
            assert (status, headers["retry-after"]) == (503, "5")
            assert "the weights are torn" in json.loads(body)["error"]["message"]
    assert {path for path in OPEN_PATHS if SERVED[path] is Kind.HEALTH} == {"/health", "/ping"}
    assert status_behind(gate, "/invocations", "POST") == 404
