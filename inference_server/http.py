"""vLLM's own OpenAI application on the engine that also serves the learner, with /status and our metrics beside it."""

import asyncio
import contextlib
import socket
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from vllm.config import ModelConfig
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.tasks import SupportedTask
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.prometheus import get_prometheus_registry

from inference_server.answer_versions import TellVersions
from inference_server.api_key import ApiKeyGate
from inference_server.config import ServerRun
from inference_server.engine.openai_options import set_openai_options
from inference_server.routes import RouteGate, Status, error_answer
from inference_server.tools_gate import RefuseTools

SHUTDOWN_TIMEOUT_S = 1
HARMONY = "gpt_oss"
"""Models of this type have a format of their own for tool calls, which vLLM always reads."""


class HttpServer(uvicorn.Server):
    """Uvicorn inside the server's own event loop, with vLLM's application."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, args: Namespace, gate: RouteGate) -> None:
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
    llm: AsyncLLM, run: ServerRun, model_path: Path, status: Status, api_key: str | None
) -> HttpServer:
    """Return a server of vLLM's OpenAI routes, /health and /metrics, and of our /status."""
    args = application_arguments(str(model_path), run.model)
    args.api_key = None if api_key is None else [api_key]  # vLLM else reads VLLM_API_KEY, which may be another
    set_openai_options(args, run.server)
    app = build_application(args, await llm.get_supported_tasks(), llm.model_config, status)
    get_prometheus_registry().register(_Metrics(status))
    can_read_tools = run.server.tool_call_parser is not None or llm.model_config.hf_config.model_type == HARMONY
    guarded = guard(app, status, can_read_tools=can_read_tools)
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


def application_arguments(model_path: str, served_name: str) -> Namespace:
    """As `vllm serve` would have them, without statistics in the log, for which a task would keep the first engine."""
    flags = ["--disable-uvicorn-access-log", "--disable-log-stats"]
    named = ["--model", model_path, "--served-model-name", served_name]
    return make_arg_parser(FlexibleArgumentParser()).parse_args([*named, *flags])


def build_application(
    args: Namespace, tasks: tuple[SupportedTask, ...], model_config: ModelConfig | None, status: Status
) -> FastAPI:
    """Return vLLM's application with our /status and /v1/models."""
    app = build_app(args, tasks, model_config)
    app.add_api_route("/status", status, methods=["GET"])
    for path, endpoint in (("/v1/models", _models), ("/v1/models/{model:path}", _model)):  # before vLLM's own
        app.router.routes.insert(0, APIRoute(path, partial(endpoint, app, status), response_model=None))
    return app


def guard(app: ASGIApp, status: Status, *, can_read_tools: bool) -> RouteGate:
    """Return an application as clients see it, but for the key."""
    telling = TellVersions(app, partial(_serving, status))
    return RouteGate(telling if can_read_tools else RefuseTools(telling), status)


async def _models(app: FastAPI, status: Status) -> dict[str, Any]:
    """vLLM's list, and which version of which run answers for each model."""
    known = await app.state.openai_serving_models.show_available_models()
    listed = known.model_dump()
    run, version = _serving(status)
    return listed | {"data": [model | {"policy_version": version, "run": run} for model in listed["data"]]}


def _serving(status: Status) -> tuple[str | None, int | None]:
    """The run and the version whose weights answer now, whichever run is served."""
    now = status()
    return now["weights_run"], now["policy_version"]


async def _model(app: FastAPI, status: Status, model: str) -> dict[str, Any] | JSONResponse:
    """One of them, which vLLM does not answer; for /v1/models/ all."""
    if not model:
        return await _models(app, status)
    listed = (await _models(app, status))["data"]
    unknown = error_answer(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    return next((known for known in listed if known["id"] == model), unknown)


class _Metrics(Collector):
    """Our numbers in Prometheus' form, read from the status whenever they are asked for."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        version = GaugeMetricFamily(
            "slipstream_policy_version", "Version that answers, and of which run; -1: the model's own", labels=["run"]
        )
        version.add_metric(
            [status["weights_run"] or ""], -1 if status["policy_version"] is None else status["policy_version"]
        )
        yield version
        tenancy = GaugeMetricFamily(
            "slipstream_tenancy",
            "1, with the server's state and the run that holds it (empty: none)",
            labels=["state", "run"],
        )
        tenancy.add_metric([status["tenancy"]["state"], status["tenancy"]["run"] or ""], 1)
        yield tenancy
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
            "slipstream_busy_answers", "Learners told, once a second each, to wait for a server", status["busy_answers"]
        )
        yield CounterMetricFamily(
            "slipstream_handshakes_failed", "Connections without a listed key", status["handshakes_failed"]
        )
