"""The live dashboard of a run: a page, its stream of server-sent events, the newest sample, Prometheus text and /health.

Hangs off the end of the data's way and only listens: the run log publishes each step's metrics, the learner's event
loop thread serves them. The invariant: nobody who looks, or stops looking, can slow a run or make it grow. History (history.py) is
read beside the run, a client that falls behind is dropped, a port in use is replaced by another.
"""

import asyncio
import logging
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from learner.config import ReportConfig
from learner.report.history import History, Metrics, read_history
from learner.report.sample_view import newest_sample
from learner.report.summary import RunDirectoryError
from learner.servers.loop_thread import LoopThread
from protocol.endpoint import is_loopback, join_address
from protocol.errors import DeadlineExceeded

log = logging.getLogger(__name__)

MAX_CLIENTS = 16
CLIENT_BACKLOG = 64  # steps that a client may be behind, beside what its socket holds
HEARTBEAT_S = 15.0  # a comment as often as this finds the clients that went away between two slow steps
SHUTDOWN_TIMEOUT_S = 1.0
START_TIMEOUT_S = 10.0
HISTORY_TIMEOUT_S = 30.0
"""After which a page does without the steps before the resume."""
HEARTBEAT = b": still here\n\n"
POLICY = (
    "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Client(msgspec.Struct, frozen=True, eq=False):
    """One open event stream. None in the queue ends it."""

    queue: asyncio.Queue[bytes | None]
    transport: asyncio.Transport | None


class Dashboard:
    """Made by `start`, ended by `close`, both in the event loop; `publish` may be called from any thread."""

    def __init__(self, run_dir: Path) -> None:
        self.address = ""
        self._loop = asyncio.get_running_loop()
        self._history = History()
        self._meanwhile: list[tuple[int, Metrics]] = []
        """Steps that came while the earlier ones were read."""
        self._is_loaded = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        self._clients: set[Client] = set()
        self._closed = False
        self._prometheus = CollectorRegistry(auto_describe=False)
        self._prometheus.register(NewestStep(lambda: self._history))
        self._name, self._num_steps = run_dir.resolve().name, planned_steps(run_dir)
        self._samples = run_dir / "samples.jsonl"
        templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
        )
        self._page = templates.get_template("dashboard.html.jinja")
        app = web.Application()
        app.router.add_get("/", self._serve_page)
        app.router.add_get("/events", self._serve_events)
        app.router.add_get("/sample", self._serve_sample)
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/health", self._serve_health)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S)

    @classmethod
    async def start(cls, run_dir: Path, port: int, host: str = "127.0.0.1") -> "Dashboard":
        """Serve a run that may have steps already. Another port is taken, with a warning, where `port` is in use."""
        dashboard = cls(run_dir)
        await dashboard._runner.setup()
        try:
            await web.TCPSite(dashboard._runner, host, port).start()
        except (OSError, OverflowError) as error:
            await web.TCPSite(dashboard._runner, host, 0).start()
            log.warning(
                "the dashboard cannot use port %d (%s), so it took port %d; set learner.report.dashboard_port to a free port, "
                "or to 0 for no dashboard",
                port, error, dashboard._runner.addresses[0][1],
            )  # fmt: skip
        dashboard.address = f"http://{join_address(host, dashboard._runner.addresses[0][1])}"
        dashboard._loading = asyncio.create_task(dashboard._load(run_dir / "metrics.jsonl"))
        return dashboard

    async def _load(self, path: Path) -> None:
        """Put the steps of before in front of those that come meanwhile, beside the run and for so long only."""
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

    def publish(self, step: int, metrics: Metrics) -> None:
        """Tell everybody who looks about one step. Thread-safe; returns at once."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._publish, step, dict(metrics))

    def _publish(self, step: int, metrics: Metrics) -> None:
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
        """Abort, not close: closing would keep what the client does not read. Its page connects again by itself."""
        self._clients.discard(client)
        if client.transport is not None:
            client.transport.abort()

    # ---- what is served

    async def _serve_page(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        page = self._page.render(name=self._name, num_steps=self._num_steps or 0, nonce=nonce)
        headers = {"Content-Security-Policy": POLICY.format(nonce=nonce), "Cache-Control": "no-store"}
        return web.Response(text=page, content_type="text/html", headers=headers)

    async def _serve_events(self, request: web.Request) -> web.StreamResponse:
        """The history, once it is read, then every step as it comes."""
        await self._is_loaded.wait()
        if self._closed:
            raise web.HTTPServiceUnavailable(text="the learner is ending\n")
        if len(self._clients) >= MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_CLIENTS} pages look already; close one of them\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        client = Client(asyncio.Queue(CLIENT_BACKLOG), request.transport)
        self._clients.add(client)
        event: bytes | None = self._history.event()  # no await since `add`: no step is missed and none comes twice
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

    async def _serve_sample(self, request: web.Request) -> web.Response:
        """What was written last, as the report shows it; 204 as long as nothing was."""
        try:
            sample = await asyncio.to_thread(newest_sample, self._samples)
        except (OSError, ValueError) as error:
            log.debug("the dashboard cannot show a sample: %s", error)
            sample = None
        if sample is None:
            return web.Response(status=204)
        return web.json_response(body=msgspec.json.encode(sample))

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
    """The newest step as Prometheus gauges: `reward/mean` is `slipstream_reward_mean`, its own name is the help."""

    def __init__(self, history: Callable[[], History]) -> None:
        self._history = history

    def collect(self) -> Iterator[GaugeMetricFamily]:
        taken: set[str] = set()
        history = self._history()
        for metric, value in (dict(history.newest) | {"step": history.newest_step}).items():
            name = "slipstream_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
            while name in taken:  # reward/a.b and reward/a-b: names of reward functions are the user's
                name += "_"
            taken.add(name)
            yield GaugeMetricFamily(name, metric, value=float(value))


def planned_steps(run_dir: Path) -> int | None:
    path = run_dir / "config.toml"
    config: dict[str, Any] = tomllib.loads(path.read_text("utf-8")) if path.is_file() else {}
    return config.get("learner", {}).get("steps")


def start_dashboard(loop: LoopThread, run_dir: Path, config: ReportConfig, cleanup: ExitStack) -> Dashboard | None:
    """None where there is to be none, or it cannot start, which costs nobody but those who wanted to look."""
    if config.dashboard_port == 0:
        return None
    host = config.dashboard_host.strip("[]")
    try:
        dashboard = loop.call(Dashboard.start(run_dir, config.dashboard_port, host), START_TIMEOUT_S)
    except Exception as error:
        log.warning("the run goes on without a live dashboard: %s", error or repr(error))
        return None
    cleanup.callback(close_dashboard, loop, dashboard)
    log.info("live dashboard: %s", dashboard.address)
    if not is_loopback(host):
        log.warning(
            "whoever reaches %s reads the run's metrics, prompts and completions (learner.report.dashboard_host)",
            dashboard.address,
        )
    return dashboard


def close_dashboard(loop: LoopThread, dashboard: Dashboard) -> None:
    try:
        loop.call(dashboard.close(), START_TIMEOUT_S)
    except DeadlineExceeded as error:
        log.warning("the live dashboard did not end: %s", error)
