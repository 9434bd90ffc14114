"""vLLM's own OpenAI application on the engine that also serves the learner, with /status and our metrics beside it."""

import asyncio
import contextlib
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.prometheus import get_prometheus_registry

from inference_server.answer_versions import TellVersions
from inference_server.api_key import OPEN_PATHS, ApiKeyGate

Status = Callable[[], dict[str, Any]]

SHUTDOWN_TIMEOUT_S = 1
RETRY_AFTER_S = 5
"""What a client is told to wait while there are no whole weights; the learner tries again at once."""


class HttpServer(uvicorn.Server):
    """Uvicorn inside the server's own event loop, with vLLM's application."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, args: Namespace, gate: "RefuseWithoutWeights") -> None:
        super().__init__(config)
        self._app, self._args, self._gate = app, args, gate
        app.state.server = self  # vLLM's handlers would end it when the engine dies, but for KEEP_ALIVE_ON_ENGINE_DEATH

    async def answer_from(self, llm: AsyncLLM) -> None:
        """Let the routes use this engine from now on."""
        await init_app_state(llm, self._app.state, self._args, await llm.get_supported_tasks())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: the server ends this one."""
        yield

    @property
    def num_requests(self) -> int:
        """Under way, without those of monitoring."""
        return self._gate.num_open

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until cancelled, then let open requests end within SHUTDOWN_TIMEOUT_S."""
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self.should_exit = True
            await serving
            raise


async def build_http(
    llm: AsyncLLM, model_path: str, served_name: str, status: Status, api_key: str | None
) -> HttpServer:
    """Return a server of vLLM's OpenAI routes, /health and /metrics, and of our /status."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        # Without stats in the log, for which a task would keep the first engine.
        [
            "--model",
            model_path,
            "--served-model-name",
            served_name,
            "--disable-uvicorn-access-log",
            "--disable-log-stats",
        ]
    )
    args.api_key = None if api_key is None else [api_key]  # vLLM else reads VLLM_API_KEY, which may be another
    app = build_app(args, await llm.get_supported_tasks(), llm.model_config)
    app.add_api_route("/status", status, methods=["GET"])
    get_prometheus_registry().register(_Metrics(status))
    app.router.routes.insert(0, APIRoute("/v1/models", partial(_models, app, status)))  # before vLLM's own
    guarded = RefuseWithoutWeights(TellVersions(app, lambda: status()["policy_version"]), status)
    config = uvicorn.Config(
        # Around the finished app, which takes no more middleware.
        guarded if api_key is None else ApiKeyGate(guarded, api_key),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        lifespan="on",
    )
    server = HttpServer(config, app, args, guarded)
    await server.answer_from(llm)
    return server


async def _models(app: FastAPI, status: Status) -> dict[str, Any]:
    """vLLM's list, and which version of each model answers."""
    known = await app.state.openai_serving_models.show_available_models()
    listed = known.model_dump()
    version = status()["policy_version"]
    return listed | {"data": [model | {"policy_version": version} for model in listed["data"]]}


class RefuseWithoutWeights:
    """ASGI middleware: without whole weights /v1/* and /health say 503 and why, for a request would wait for a push; and while it
    drains, what has begun goes on.

    /health too, as vLLM's own says 503 when it cannot generate: a load balancer then asks another server.
    """

    def __init__(self, app: ASGIApp, status: Status) -> None:
        self._app, self._status = app, status
        self.num_open = 0
        """Requests that were let through and are under way, without those of monitoring."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs_weights = scope["type"] == "http" and scope["path"].startswith(("/v1/", "/health"))
        reason = self._status()["unavailable"] if needs_weights else None
        if reason is None:
            is_work = scope["type"] == "http" and scope["path"].rstrip("/") not in OPEN_PATHS
            self.num_open += is_work
            try:
                await self._app(scope, receive, send)
            finally:
                self.num_open -= is_work
            return
        message = f"{reason}. Try again in {RETRY_AFTER_S} s; /status shows when it is over"
        error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
        answer = JSONResponse({"error": error}, 503, {"Retry-After": str(RETRY_AFTER_S)})
        await answer(scope, receive, send)


class _Metrics(Collector):
    """Our numbers in Prometheus' form, read from the status whenever they are asked for."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        version = -1 if status["policy_version"] is None else status["policy_version"]
        yield GaugeMetricFamily("slipstream_policy_version", "Policy version served, -1 before the first push", version)
        yield GaugeMetricFamily("slipstream_groups_running", "Groups being sampled", status["groups_running"])
        yield GaugeMetricFamily("slipstream_groups_unacked", "Finished groups kept", status["groups_unacked"])
        yield GaugeMetricFamily("slipstream_idle_frac", "Share of time without a running group", status["idle_frac"])
        yield CounterMetricFamily("slipstream_engine_restarts", "Engines started again", status["engine_restarts"])
        yield CounterMetricFamily("slipstream_pushes", "Pushes completed", status["pushes_done"])
        yield CounterMetricFamily("slipstream_pushes_failed", "Pushes failed", status["pushes_failed"])
        yield CounterMetricFamily("slipstream_push_stall_seconds", "Generation stalled", status["push_stall_s"])
        yield CounterMetricFamily("slipstream_tokens", "Tokens sampled for groups", status["tokens_generated"])
        yield CounterMetricFamily(
            "slipstream_messages_refused", "Malformed or uncalled-for messages", status["messages_refused"]
        )
        yield CounterMetricFamily(
            "slipstream_handshakes_failed", "Connections without a listed key", status["handshakes_failed"]
        )
