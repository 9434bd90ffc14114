"""The key of the HTTP side: who is let through, and where the key may come from."""

import asyncio
from pathlib import Path

import pytest

from inference_server.config import ServerConfig
from inference_server.http_access import ApiKeyGate, read_api_key
from protocol.channel.keys import write_secret
from protocol.errors import ConfigError
from tests.inference_server.asgi import ask, everything

KEY = "sk-of-this-test"
WRONG = ("", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Basic {KEY}", f"Bearer  {KEY}")


def status_of(path: str, method: str = "GET", authorization: str | None = None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    return asyncio.run(ask(ApiKeyGate(everything, KEY), path, method, headers=headers))[0]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/invocations",
        "/",
        "/healthz",
        "/v1/health",
        "/metrics/../v1/models",
        "//health",
        "/health/x",
    ],
)
def test_whatever_is_not_for_monitoring_asks_for_the_key(path: str) -> None:
    for method in ("GET", "POST"):
        assert status_of(path, method) == 401
        assert {status_of(path, method, wrong) for wrong in WRONG} == {401}
        assert status_of(path, method, f"Bearer {KEY}") == status_of(path, method, f"bearer {KEY}") == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/metrics/", "/status", "/version", "/ping"])
def test_monitoring_and_a_browsers_question_need_no_key(path: str) -> None:
    assert status_of(path) == status_of("/v1/models", "OPTIONS") == 200


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
