"""The key of the HTTP side: a real uvicorn in front of a small app, and where the key may come from."""

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from inference_server.config import ServerConfig
from inference_server.http_access import ApiKeyGate, read_api_key
from protocol.channel.keys import write_secret
from protocol.errors import ConfigError

TIMEOUT_S = 60.0
KEY = "sk-of-this-test"


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"in: {request.url.path}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "OPTIONS"])])
    app.add_middleware(ApiKeyGate, key=KEY)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    give_up_at = time.monotonic() + TIMEOUT_S
    while not server.started:
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(TIMEOUT_S)
    listener.close()


def status_of(url: str, method: str = "GET", authorization: str | None = None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers), timeout=60) as got:
            return got.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/models",
        "/invocations",
        "/inference/v1/generate",
        "/tokenize",
        "/scale_elastic_ep",
        "/",
        "/healthz",
        "/v1/health",
        "/metrics/../v1/models",
        "//health",
        "/health/x",
    ],
)
def test_whatever_is_not_for_monitoring_asks_for_the_key(url: str, path: str) -> None:
    for method in ("GET", "POST"):
        assert status_of(url + path, method) == 401
        for wrong in ("", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Basic {KEY}", f"Bearer  {KEY}"):
            assert status_of(url + path, method, wrong) == 401
        assert status_of(url + path, method, f"Bearer {KEY}") == 200
        assert status_of(url + path, method, f"bearer {KEY}") == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/metrics/", "/status", "/version", "/ping"])
def test_monitoring_and_a_browsers_question_need_no_key(url: str, path: str) -> None:
    assert status_of(url + path) == 200
    assert status_of(f"{url}/v1/models", "OPTIONS") == 200


def test_the_key_comes_from_a_private_file_or_from_vllms_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert read_api_key(ServerConfig(), insecure=False) is None
    monkeypatch.setenv("VLLM_API_KEY", "of-the-environment")
    assert read_api_key(ServerConfig(), insecure=False) == "of-the-environment"
    write_secret(tmp_path / "key", KEY)
    config = ServerConfig(api_key_file=str(tmp_path / "key"))
    assert read_api_key(config, insecure=False) == KEY
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"server\.api_key_file.* mode 644.*chmod 600"):
        read_api_key(config, insecure=False)


@pytest.mark.parametrize("key", [None, ""])
def test_http_beyond_loopback_needs_a_key_or_a_word_for_going_without(
    monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    for host in ("0.0.0.0", "", "10.0.0.5"):
        with pytest.raises(ConfigError, match=r"server\.http_host.*server\.api_key_file.*insecure = true"):
            read_api_key(ServerConfig(http_host=host), insecure=False)
    assert read_api_key(ServerConfig(http_host="0.0.0.0"), insecure=True) is None
    assert read_api_key(ServerConfig(http_host="0.0.0.0", http_port=0), insecure=False) is None
