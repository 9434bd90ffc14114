"""The live dashboard of a run: a page, server-sent events, charts, completions, Prometheus text, /health.

    run log ─▶ publish: each step's metrics ─▶ Dashboard, in the learner's event-loop thread ─▶ clients

Threads read the history and make the charts (history.py). A slow client is dropped. A free port replaces a port in use.
Invariant: no client can slow the run or make its memory grow.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from learner.config import ReportConfig
from learner.report.history import History, LiveCharts, StepMetrics, read_history
from learner.report.sample_view import newest_table
from learner.report.summary import RunDirectoryError
from learner.report.templates import template
from learner.servers.loop_thread import LoopThread
from protocol.endpoint import is_loopback, join_address

log = logging.getLogger(__name__)

MAX_CLIENTS = 16
CLIENT_BACKLOG = 64  # maximum number of steps a client may lag, in addition to its socket buffer
HEARTBEAT_S = 15.0  # a periodic comment detects clients that disconnected between slow steps
SHUTDOWN_TIMEOUT_S = 1.0
START_TIMEOUT_S = 10.0
HISTORY_TIMEOUT_S = 30.0
"""Time limit for loading the steps before a resume. The page then does without them."""
HEARTBEAT = b": still here\n\n"
POLICY = (
    "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Client(msgspec.Struct, frozen=True, eq=False):
    """An open event stream. None in the queue ends it."""

    queue: asyncio.Queue[bytes | None]
    transport: asyncio.Transport | None


class Dashboard:
    """The dashboard server.

    `start` creates it and `close` ends it, both in the event loop. `publish` is thread-safe.
    """

    def __init__(self, run_dir: Path, num_steps: int) -> None:
        self.address = ""
        self._loop = asyncio.get_running_loop()
        self._history = History()
        self._meanwhile: list[tuple[int, StepMetrics]] = []
        """Steps published while the earlier ones are loading."""
        self._is_loaded = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        self._clients: set[Client] = set()
        self._closed = False
        self._prometheus = CollectorRegistry(auto_describe=False)
        self._prometheus.register(NewestStep(lambda: self._history))
        self._name, self._num_steps = run_dir.resolve().name, num_steps
        self._samples = run_dir / "samples.jsonl"
        self._charts = LiveCharts(lambda: self._history)
        self._page, self._completions = template("dashboard.html.jinja"), template("completions.html.jinja")
        app = web.Application()
        app.router.add_get("/", self._serve_page)
        app.router.add_get("/events", self._serve_events)
        app.router.add_get("/charts", self._serve_charts)
        app.router.add_get("/completions", self._serve_completions)
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/health", self._serve_health)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S)

    @classmethod
    async def start(cls, run_dir: Path, port: int, host: str = "127.0.0.1", num_steps: int = 0) -> "Dashboard":
        """Serve a run of `num_steps` (0: unknown), which may already have steps.

        If `port` is in use, the dashboard logs a warning and takes a free one.
        """
        dashboard = cls(run_dir, num_steps)
        await dashboard._runner.setup()
        try:
            await web.TCPSite(dashboard._runner, host, port).start()
        except (OSError, OverflowError) as error:
            await web.TCPSite(dashboard._runner, host, 0).start()
            log.warning(
                "the dashboard cannot use port %d (%s), so it took port %d; set learner.report.dashboard_port to a "
                "free port, or to 0 for no dashboard",
                port, error, dashboard._runner.addresses[0][1],
            )  # fmt: skip
        dashboard.address = f"http://{join_address(host, dashboard._runner.addresses[0][1])}"
        dashboard._loading = asyncio.create_task(dashboard._load(run_dir / "metrics.jsonl"))
        return dashboard

    async def _load(self, path: Path) -> None:
        """Load the earlier steps in a thread and append the steps published meanwhile.

        On a timeout or error, the history starts without the earlier steps.
        """
        deadline = time.monotonic() + HISTORY_TIMEOUT_S
        try:
            history = await asyncio.to_thread(read_history, path, lambda: self._closed or time.monotonic() > deadline)
            for step, metrics in self._meanwhile:
                history.add(step, metrics)
            self._history = history
        except (RunDirectoryError, OSError, ValueError) as error:  # TimeoutError is an OSError
            log.warning("the dashboard begins without the earlier steps: %s", error)
        finally:
            self._meanwhile = []
            self._is_loaded.set()

    async def close(self) -> None:
        self._closed = True
        if self._loading is not None:
            await self._loading
        for client in list(self._clients):
            if client.queue.full():
                self._drop(client)
            else:
                client.queue.put_nowait(None)
        await self._runner.cleanup()

    def publish(self, step: int, metrics: StepMetrics) -> None:
        """Send one step to all clients. Thread-safe; returns at once."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._publish, step, dict(metrics))

    def _publish(self, step: int, metrics: StepMetrics) -> None:
        if not self._is_loaded.is_set():
            self._meanwhile.append((step, metrics))
        event = b"data: " + self._history.add(step, metrics) + b"\n\n"
        for client in list(self._clients):
            try:
                client.queue.put_nowait(event)
            except asyncio.QueueFull:
                log.debug("dropped a dashboard client that is %d steps behind", CLIENT_BACKLOG)
                self._drop(client)

    def _drop(self, client: Client) -> None:
        """Abort the connection, because a close would keep the unread data.

        The page reconnects automatically.
        """
        self._clients.discard(client)
        if client.transport is not None:
            client.transport.abort()

    # ---- request handlers

    async def _serve_page(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        page = self._page.render(name=self._name, num_steps=self._num_steps, nonce=nonce)
        headers = {"Content-Security-Policy": POLICY.format(nonce=nonce), "Cache-Control": "no-store"}
        return web.Response(text=page, content_type="text/html", headers=headers)

    async def _serve_events(self, request: web.Request) -> web.StreamResponse:
        """Send the history once it is loaded, then every new step."""
        await self._is_loaded.wait()
        if self._closed:
            raise web.HTTPServiceUnavailable(text="the learner is ending\n")
        if len(self._clients) >= MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_CLIENTS} pages look already; close one of them\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        client = Client(asyncio.Queue(CLIENT_BACKLOG), request.transport)
        self._clients.add(client)
        event: bytes | None = self._history.event()  # no await since `add`, so no step is missed or repeated
        try:
            await response.prepare(request)
            while event is not None:
                await response.write(event)
                event = await next_event(client.queue)
        except ConnectionError:
            pass  # the page was closed, or dropped
        finally:
            self._clients.discard(client)
        return response

    async def _serve_charts(self, request: web.Request) -> web.Response:
        await self._is_loaded.wait()
        response = web.Response(body=await self._charts.newest(), content_type="application/json")
        response.enable_compression()
        return response

    async def _serve_completions(self, request: web.Request) -> web.Response:
        """Return the table of the newest completions, or status 204 without any."""
        try:
            table = await asyncio.to_thread(newest_table, self._samples)
        except (RunDirectoryError, OSError) as error:
            log.debug("the dashboard cannot show completions: %s", error)
            return web.Response(status=204)
        if not table.samples:
            return web.Response(status=204)
        page = self._completions.render(table=table).encode("utf-8", "replace")
        return web.Response(body=page, content_type="text/html", charset="utf-8")

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._prometheus), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _serve_health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "step": self._history.newest_step})


async def next_event(queue: asyncio.Queue[bytes | None]) -> bytes | None:
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            return await queue.get()
    except TimeoutError:
        return HEARTBEAT


class NewestStep(Collector):
    """Collector of the newest step as Prometheus gauges.

    `reward/mean` becomes `slipstream_reward_mean`, with the name of the metric as its help.
    """

    def __init__(self, history: Callable[[], History]) -> None:
        self._history = history

    def collect(self) -> Iterator[GaugeMetricFamily]:
        taken: set[str] = set()
        history = self._history()
        for metric, value in (dict(history.newest) | {"step": history.newest_step}).items():
            name = "slipstream_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
            while name in taken:  # reward/a.b and reward/a-b collide: users name the reward functions
                name += "_"
            taken.add(name)
            yield GaugeMetricFamily(name, metric, value=float(value))


def start_dashboard(
    loop: LoopThread, run_dir: Path, config: ReportConfig, cleanup: ExitStack, num_steps: int = 0
) -> Dashboard | None:
    """Start the dashboard; return None if it is disabled or fails to start.

    A failure is only logged and never affects the run.
    """
    if config.dashboard_port == 0:
        return None
    host = config.dashboard_host.strip("[]")
    try:
        dashboard = loop.call(Dashboard.start(run_dir, config.dashboard_port, host, num_steps), START_TIMEOUT_S)
    except Exception as error:
        log.warning("the run goes on without a live dashboard: %s", error or repr(error))
        return None
    cleanup.callback(lambda: loop.end(dashboard.close(), START_TIMEOUT_S))
    log.info("live dashboard: %s", dashboard.address)
    if not is_loopback(host):
        log.warning(
            "anyone who reaches %s can read the run's metrics, prompts and completions (learner.report.dashboard_host)",
            dashboard.address,
        )
    return dashboard
