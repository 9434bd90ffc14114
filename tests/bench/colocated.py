"""Run the whole system with `slipstream colocate` and measure it.

config ─▶ server and learner ─▶ RUN_DIR/metrics.jsonl, and samples of the server's /status
"""

import http.client
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from learner.config import LearnerRun
from protocol.config import to_toml
from protocol.errors import SlipstreamError
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
POLL_S = 0.5


class ServerSeen(msgspec.Struct):
    """The server's own counters by time of day."""

    times: list[float] = msgspec.field(default_factory=list)
    idle_s: list[float] = msgspec.field(default_factory=list)

    def idle_frac(self, start: float, end: float) -> float:
        """Return the share of the time in which the server had no group."""
        idle_s = np.interp([start, end], self.times, self.idle_s)
        return float((idle_s[1] - idle_s[0]) / (end - start))


def run_colocated(
    run: LearnerRun,
    server: dict[str, Any],
    *,
    resume: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
    is_done: Callable[[], bool] = lambda: False,
) -> ServerSeen:
    """Run on free ports to the end, or interrupt the run at `is_done`. Call `meanwhile` periodically.

    Raises SlipstreamError if the command fails.
    """
    http_port = free_port()
    replace = msgspec.structs.replace
    evaluation = replace(run.learner.evaluation, url=f"http://127.0.0.1:{http_port}/v1")
    run = replace(
        run, endpoint=f"tcp://127.0.0.1:{free_port()}", server=server | {"http_port": http_port},
        learner=replace(run.learner, evaluation=evaluation),
    )  # fmt: skip
    config, console = Path(run.run_dir).with_suffix(".toml"), Path(run.run_dir).with_suffix(".log")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(to_toml(run))
    command = [sys.executable, "-m", "deploy.cli", "colocate", str(config), *(["--resume"] if resume else [])]
    seen = ServerSeen()
    with console.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            is_told = False
            while process.poll() is None:
                meanwhile()
                if not is_told and is_done():
                    process.send_signal(signal.SIGINT)
                    is_told = True
                _look(seen, f"http://127.0.0.1:{http_port}/status")
                time.sleep(POLL_S)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        tail = console.read_text()[-3000:]
        raise SlipstreamError(f"{' '.join(command)} ended with exit code {process.returncode}:\n{tail}")
    return seen


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _look(seen: ServerSeen, url: str) -> None:
    """Sample /status. A starting or ending server gives no sample."""
    try:
        with urllib.request.urlopen(url, timeout=POLL_S) as reply:
            status = json.load(reply)
    except (OSError, http.client.HTTPException):
        return
    seen.times.append(time.time())
    seen.idle_s.append(status["idle_frac"] * status["uptime_s"])
