"""vLLM's OpenAI application on the engine that also serves the learner, with /status and our metrics.

    request ─▶ http_access.py ─▶ RefuseTools ─▶ TellVersions ─▶ vLLM's routes ─▶ VersionedLLM.generate

Each response names its policy: in the headers, in the model list, and at the end of a stream. A server
without a tool-call parser refuses requests with tools and names the missing key. vLLM itself would name its
own flags, or return a tool call as text.

Invariant: a complete response names the versions of its oldest and newest tokens, and their run. A stream
starts with the oldest possible version and ends with both versions.
"""

import asyncio
import contextlib
import json
import socket
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.config import ModelConfig
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.tasks import SupportedTask
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.prometheus import get_prometheus_registry

from inference_server.config import ServerRun
from inference_server.engine.openai_options import set_openai_options
from inference_server.engine.versioned_llm import UNTOUCHED, sampled_by
from inference_server.http_access import ApiKeyGate, RouteGate, Status, error_answer
from protocol.endpoint import END, NO_VERSION, START, header_of_runs

Serving = Callable[[], tuple[str | None, int | None]]
"""Returns the run and the version of the current weights. None: the model's own weights."""
PATHS = {"/v1/chat/completions", "/v1/responses", "/v1/messages"}
"""Routes whose requests may contain tools."""
REASON = (
    "tools require server.tool_call_parser, which is not set on this server; set it to the format of the model's "
    'tool calls (hermes, llama3_json, mistral, ...), or send the request without tools or with tool_choice "none"'
)
SHUTDOWN_TIMEOUT_S = 1
HARMONY = "gpt_oss"
"""Model type with its own tool-call format, which vLLM always parses."""


class TellVersions:
    """ASGI middleware that adds the policy versions to responses."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        labels: set[str] = set()
        is_stream = False
        run_before, _ = self._serving()

        def final_headers() -> dict[str, str]:
            """Return the headers, or none if no policy sampled the response: a list, an error."""
            run, _ = self._serving()
            return header_of_runs(run_before, run) | _version_headers(labels) if labels else {}

        async def send_with_versions(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                is_stream = headers.get("content-type", "").startswith("text/event-stream")
                headers.update(self._initial_headers() if is_stream else final_headers())
            elif is_stream and labels and not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + _comment(final_headers())}
            await send(message)

        token = sampled_by.set(labels)
        try:
            await self._app(scope, receive, send_with_versions)
        finally:
            sampled_by.reset(token)

    def _initial_headers(self) -> dict[str, str]:
        run, version = self._serving()
        return header_of_runs(run) | {START: str(NO_VERSION if version is None else version)}


def _version_headers(labels: Collection[str]) -> dict[str, str]:
    versions = [NO_VERSION if label == UNTOUCHED else int(label) for label in labels]
    return {START: str(min(versions)), END: str(max(versions))}


def _comment(headers: Mapping[str, str]) -> bytes:
    """Return the headers as comments of server-sent events, which clients ignore."""
    return "".join(f": {name}: {value}\n\n" for name, value in headers.items()).encode()


class RefuseTools:
    """ASGI middleware that refuses tools on a server without server.tool_call_parser."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].rstrip("/") not in PATHS:
            await self._app(scope, receive, send)
            return
        messages = await _whole(receive)
        if _requests_tools(b"".join(message.get("body", b"") for message in messages)):
            await error_answer(400, "BadRequestError", REASON, "tools")(scope, receive, send)
            return

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, receive_again, send)


async def _whole(receive: Receive) -> list[Message]:
    """Return all messages of a request body, unchanged."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _requests_tools(body: bytes) -> bool:
    """Return True if the body requests tools. vLLM refuses a body that is not JSON."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(request, dict) and bool(request.get("tools")) and not _is_none(request.get("tool_choice"))


def _is_none(tool_choice: Any) -> bool:
    """Return True if the tool choice is "none", in the form of OpenAI or Anthropic."""
    return tool_choice == "none" or (isinstance(tool_choice, dict) and tool_choice.get("type") == "none")


class HttpServer(uvicorn.Server):
    """Uvicorn server in the inference server's event loop, with vLLM's application."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, args: Namespace, gate: RouteGate) -> None:
        super().__init__(config)
        self._app, self._args, self._gate = app, args, gate
        # Without VLLM_KEEP_ALIVE_ON_ENGINE_DEATH, vLLM's handlers would stop it when the engine dies.
        app.state.server = self

    async def answer_from(self, llm: AsyncLLM) -> None:
        """Let the routes use this engine from now on."""
        await init_app_state(llm, self._app.state, self._args, await llm.get_supported_tasks())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because the inference server stops this server."""
        yield

    @property
    def num_requests(self) -> int:
        """Number of running requests, without health checks and monitoring."""
        return self._gate.num_open

    async def serve_on(self, listener: socket.socket) -> None:
        """Serve until canceled, then let open requests finish within SHUTDOWN_TIMEOUT_S."""
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
    """Return a server with vLLM's OpenAI routes, /health, /metrics and our /status."""
    args = application_arguments(str(model_path), run.model)
    set_openai_options(args, run.server)
    app = build_application(args, await llm.get_supported_tasks(), llm.model_config, status)
    get_prometheus_registry().register(_Metrics(status))
    can_read_tools = run.server.tool_call_parser is not None or llm.model_config.hf_config.model_type == HARMONY
    guarded = guard(app, status, can_read_tools=can_read_tools)
    config = uvicorn.Config(
        # Wrap the finished app, which accepts no more middleware.
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
    """Return the arguments of `vllm serve`, without access log, statistics log and key.

    The task that logs statistics would keep a reference to the first engine.
    """
    flags = ["--disable-uvicorn-access-log", "--disable-log-stats"]
    named = ["--model", model_path, "--served-model-name", served_name]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*named, *flags])
    # ApiKeyGate checks the key. vLLM's own check does not know x-api-key, and without a value here it would read
    # VLLM_API_KEY.
    args.api_key = [""]
    return args


def build_application(
    args: Namespace, tasks: tuple[SupportedTask, ...], model_config: ModelConfig | None, status: Status
) -> FastAPI:
    """Return vLLM's application with our /status and /v1/models."""
    app = build_app(args, tasks, model_config)
    app.add_api_route("/status", status, methods=["GET"])
    # These routes precede vLLM's own.
    for path, endpoint in (("/v1/models", _models), ("/v1/models/{model:path}", _model)):
        app.router.routes.insert(0, APIRoute(path, partial(endpoint, app, status), response_model=None))
    return app


def guard(app: ASGIApp, status: Status, *, can_read_tools: bool) -> RouteGate:
    """Return the application with all middleware except the API key check."""
    with_versions = TellVersions(app, partial(_serving, status))
    return RouteGate(with_versions if can_read_tools else RefuseTools(with_versions), status)


async def _models(app: FastAPI, status: Status) -> dict[str, Any]:
    """Return vLLM's model list, with the version and the run of the current weights."""
    known = await app.state.openai_serving_models.show_available_models()
    listed = known.model_dump()
    run, version = _serving(status)
    return listed | {"data": [model | {"policy_version": version, "run": run} for model in listed["data"]]}


def _serving(status: Status) -> tuple[str | None, int | None]:
    """Return the run and the version of the current weights, whichever run is served."""
    now = status()
    return now["weights_run"], now["policy_version"]


async def _model(app: FastAPI, status: Status, model: str) -> dict[str, Any] | JSONResponse:
    """Return one entry of the model list, or the whole list for an empty name.

    vLLM has no route for a single model.
    """
    if not model:
        return await _models(app, status)
    listed = (await _models(app, status))["data"]
    unknown = error_answer(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    return next((known for known in listed if known["id"] == model), unknown)


class _Metrics(Collector):
    """Prometheus collector that reads our metrics from the status at each scrape."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        version = GaugeMetricFamily(
            "slipstream_policy_version",
            "Policy version of the served weights, labeled with their run; -1: the model's own weights",
            labels=["run"],
        )
        version.add_metric(
            [status["weights_run"] or ""], -1 if status["policy_version"] is None else status["policy_version"]
        )
        yield version
        tenancy = GaugeMetricFamily(
            "slipstream_tenancy",
            "1, labeled with the server's state and the run that holds it (empty: none)",
            labels=["state", "run"],
        )
        tenancy.add_metric([status["tenancy"]["state"], status["tenancy"]["run"] or ""], 1)
        yield tenancy
        yield GaugeMetricFamily("slipstream_groups_running", "Groups being sampled", status["groups_running"])
        yield GaugeMetricFamily(
            "slipstream_groups_unacked", "Finished groups kept until their Ack", status["groups_unacked"]
        )
        yield GaugeMetricFamily("slipstream_idle_frac", "Share of time without a running group", status["idle_frac"])
        yield CounterMetricFamily("slipstream_engine_restarts", "Engine restarts", status["engine_restarts"])
        yield CounterMetricFamily("slipstream_weight_syncs", "Completed weight syncs", status["pushes_done"])
        yield CounterMetricFamily("slipstream_weight_syncs_failed", "Failed weight syncs", status["pushes_failed"])
        yield CounterMetricFamily(
            "slipstream_weight_sync_stall_seconds",
            "Seconds without generation during weight syncs",
            status["push_stall_s"],
        )
        yield CounterMetricFamily("slipstream_tokens", "Tokens sampled for groups", status["tokens_generated"])
        yield CounterMetricFamily(
            "slipstream_messages_refused", "Malformed or unexpected messages", status["messages_refused"]
        )
        yield CounterMetricFamily(
            "slipstream_busy_answers", "Busy answers, one per second to each waiting learner", status["busy_answers"]
        )
        yield CounterMetricFamily(
            "slipstream_handshakes_failed", "Connections without a listed key", status["handshakes_failed"]
        )
