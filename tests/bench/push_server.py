"""The server of the benchmark of pushes into real vLLM, and a link that keeps it generating.

    ServedModel: `python -m inference_server` ◀── continuous group requests, PushBegin … PushDone ──▶ BusyLink

BusyLink is a connection to the server without ledger and rewards.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from inference_server.config import ServerRun
from learner.config import LearnerRun
from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from protocol.config import to_toml
from protocol.errors import SlipstreamError
from protocol.messages import PROTOCOL_VERSION, Generate, Group, GroupFailed, Hello, Sampling
from protocol.model_files import fingerprint, resolve_model
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 240
DEADLINE_S = 120.0
SAMPLE_EVERY_S = 0.004


class ServedModel:
    """A server process, killed with all its children at `close`. Raises SlipstreamError if it does not start."""

    def __init__(self, model: str, directory: Path, **settings: Any) -> None:
        """`settings`: keys of [server] in addition to those of every benchmark."""
        self.model = model
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        directory.mkdir(parents=True, exist_ok=True)
        config, self._log = directory / "run.toml", directory / "server.log"
        config.write_text(to_toml(server_run(model, directory, self.endpoint, settings)))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "inference_server", str(config)], cwd=ROOT, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._wait_until_ready()

    @property
    def processes(self) -> list[psutil.Process]:
        """Return the server's and vLLM's processes."""
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def _wait_until_ready(self) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while "ready after" not in (output := self._log.read_text()):
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                self.close()
                raise SlipstreamError(f"the server of {self.model} did not start:\n{output[-3000:]}")
            time.sleep(0.2)


def server_run(model: str, directory: Path, endpoint: str, settings: dict[str, Any]) -> ServerRun:
    """Return a server's config, which bare vLLM reads too, to run with the same settings."""
    server: dict[str, Any] = {
        "enforce_eager": True, "kv_cache_memory_mib": 512, "block_size": 32, "http_port": 0, **settings,
    }  # fmt: skip
    shared = {"model": model, "run_dir": str(directory), "endpoint": endpoint, "dtype": "float32"}
    return msgspec.convert(shared | {"server": server}, ServerRun)


class BusyLink:
    """A real link to a server that keeps `num_groups` groups in flight after `keep_busy`."""

    def __init__(self, server: ServedModel, num_groups: int, sampling: Sampling) -> None:
        self.num_groups, self._sampling = num_groups, sampling
        self.num_tokens = 0
        """Number of tokens of the received completions."""
        self._num_asked = 0
        hello = Hello(
            run=f"bench-{time.monotonic_ns()}", protocol_version=PROTOCOL_VERSION, learner="bench",
            model=fingerprint(resolve_model(server.model)),
        )  # fmt: skip
        self.fleet = Fleet(bench_run(server), hello, LoopThread("bench-link"))
        self.fleet.start(self._on_group)

    def keep_busy(self) -> None:
        for _ in range(self.num_groups):
            self.fleet.loop.spawn(self._ask())

    def close(self) -> None:
        self.fleet.loop.stop()
        self.fleet.close()

    async def _ask(self) -> None:
        self._num_asked += 1
        prompt = np.random.default_rng(self._num_asked).integers(2, 14, size=16).astype(np.int32)
        request = Generate(
            group_id=str(self._num_asked), prompt_token_ids=prompt, sampling=self._sampling, deadline_s=DEADLINE_S
        )
        await self.fleet.members[0].link.generate(request)

    def _on_group(self, member: Member, group: Group | GroupFailed) -> None:
        assert isinstance(group, Group), group
        self.num_tokens += sum(len(completion.token_ids) for completion in group.completions)
        self.fleet.loop.spawn(member.link.acknowledge([group.group_id]))
        self.fleet.loop.spawn(self._ask())


def bench_run(server: ServedModel) -> LearnerRun:
    """Return a run with the keys that a fleet reads."""
    learner = {
        "steps": 1,
        "connect_timeout_s": 60.0,
        "data": {"task": "reverse"},
        "reward": {"functions": ["exact_match"]},
    }
    shared = {"model": server.model, "run_dir": "unused", "endpoint": server.endpoint, "dtype": "float32"}
    return msgspec.convert(shared | {"learner": learner}, LearnerRun)


class PeakMemory:
    """Peak of the resident memory of some processes above the initial value, in bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_bytes_kept = 0
        """Increase that remains at the end."""


@contextmanager
def peak_memory(processes: list[psutil.Process]) -> Iterator[PeakMemory]:
    def resident() -> int:
        return sum(process.memory_info().rss for process in processes)

    def sample() -> None:
        while not ended.wait(SAMPLE_EVERY_S):
            peak.num_bytes = max(peak.num_bytes, resident() - before)

    peak, before, ended = PeakMemory(), resident(), threading.Event()
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        ended.set()
        sampler.join()
        peak.num_bytes_kept = resident() - before
