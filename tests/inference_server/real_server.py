"""The real server for tests: a separate process, real vLLM, real sockets."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from transformers import PreTrainedModel

from protocol.channel.keys import LearnerKeys
from protocol.errors import SlipstreamError
from protocol.hardware import has_gpu
from protocol.messages import Farewell, PushDone, Scores
from protocol.model_files import fingerprint
from tests.inference_server import tiny_gpt2
from tests.inference_server.forked_server import ForkedServer
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 180
TEST_TIMEOUT_S = 180
LEAVE_TIMEOUT_S = 1.0
TOLERANCE = 1e-4


class RealServer:
    """`python -m inference_server` in a separate process group, with a tiny GPT-2 by default.

    A forked server starts in a fifth of the time. Its environment cannot be read from outside, and vLLM's processes are
    forked too. On a GPU it is never forked, so that each process finds CUDA as a user's does.
    """

    keys: LearnerKeys | None = None
    """Keys that a learner needs, if the server has keys."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        model: PreTrainedModel | Path | None = None,
        program: str = "inference_server",
        is_forked: bool = False,
    ) -> None:
        self.model = model if isinstance(model, Path) else directory / "model"
        self.port, self.http_port = free_port(), free_port()
        self.endpoint, self.url = f"tcp://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.http_port}"
        if not isinstance(model, Path):
            tiny_gpt2.save(model or tiny_gpt2.make_model(seed=0), self.model)
        config = directory / "run.toml"
        config.write_text(
            f'model = "{self.model}"\nrun_dir = "{directory}"\nendpoint = "{self.endpoint}"\ndtype = "float32"\n'
            "[server]\nenforce_eager = true\nkv_cache_memory_mib = 64\nblock_size = 32\n"
            f"http_port = {self.http_port}\n[learner]\nsteps = 1\n"
        )
        self._program, self._arguments = program, [str(config), *flags]
        self._is_forked = is_forked and not has_gpu()
        self.log_file = directory / "server.log"
        self.start()

    def start(self) -> None:
        """Start or restart the server on the same ports."""
        self.process: subprocess.Popen[bytes] | ForkedServer
        with self.log_file.open("w") as log:
            if self._is_forked:
                self.process = ForkedServer(self._program, self._arguments, self.log_file)
            else:
                command = [sys.executable, "-m", self._program, *self._arguments]
                self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_for(self, text: str) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while text not in self.log:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < give_up_at, f"no {text!r} within {START_TIMEOUT_S} s:\n{self.log}"
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def kill_process(self, name: str) -> None:
        """SIGKILL the process of vLLM with `name` in its name."""
        (process,) = (child for child in self.family()[1:] if name in child.name())
        process.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=60)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()


def running_server(directory: Path, *flags: str, **kwargs: Any) -> Iterator[RealServer]:
    server = RealServer(directory, *flags, **kwargs)
    try:
        server.wait_for("ready after")
        yield server
    finally:
        server.kill()


def with_learner(
    server: RealServer, test: Callable[[ScriptedLearner], Awaitable[None]], timeout_s: float = TEST_TIMEOUT_S
) -> None:
    """Run a test with a learner of a new run, which ends with the test."""

    async def run() -> None:
        model = fingerprint(server.model)
        learner = ScriptedLearner(server.endpoint, f"run-{time.monotonic_ns()}", model, server.keys)
        try:
            async with asyncio.timeout(timeout_s):
                learner.num_workers = (await learner.join()).num_workers
                await test(learner)
        finally:
            with contextlib.suppress(SlipstreamError):
                await learner.channel.send(Farewell(is_over=True), LEAVE_TIMEOUT_S)
            learner.close()

    asyncio.run(run())


async def push(learner: ScriptedLearner, version: int, model: PreTrainedModel) -> PushDone:
    outcome, checksum = await learner.push(version, tiny_gpt2.named_tensors(model), bucket_bytes=32 << 10)
    assert isinstance(outcome, PushDone), outcome.message
    assert outcome.checksum == checksum
    return outcome


async def score(learner: ScriptedLearner, token_ids: list[int]) -> Scores:
    scores = await learner.score(token_ids)
    assert scores.error is None
    return scores
