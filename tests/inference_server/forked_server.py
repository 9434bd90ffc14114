"""Run `python -m PROGRAM …` in a process forked from one that has imported vLLM, so that it starts quickly.

    pytest's workers ─ Start ─▶ the shared fork server ─ fork ─▶ server ─ fork ─▶ EngineCore, workers
                     ◀─ pid, finally the exit code

vLLM's processes are forked too, as on a GPU. On a CPU vLLM starts new interpreters, which import for 7 s each. The
start of a new interpreter is tested by tests that run `python -m inference_server`.
"""

import importlib
import multiprocessing
import multiprocessing.context
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "SLIPSTREAM_TESTS_FORK_SERVER"
"""Environment variable of pytest and its workers: path of the fork server's socket."""
START_TIMEOUT_S = 120.0
PRELOADED = (
    "inference_server.engine.vllm_engine", "inference_server.http", "inference_server.server",
    "transformers.models.auto.modeling_auto", "vllm.entrypoints.launchers.app", "vllm.model_executor.models.gpt2",
    "vllm.model_executor.models.llama", "vllm.model_executor.models.qwen2", "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
)  # fmt: skip


class Start(msgspec.Struct, frozen=True):
    program: str
    arguments: list[str]
    environment: dict[str, str]
    log: str


class ForkedServer:
    """A process of the fork server, with the methods of Popen that tests use."""

    returncode: int | None = None

    def __init__(self, program: str, arguments: Sequence[str], log: Path) -> None:
        start = Start(program, list(arguments), dict(os.environ), str(log))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS])
        self._socket.sendall(msgspec.json.encode(start) + b"\n")
        self._answers = self._socket.makefile("rb")
        self._socket.settimeout(START_TIMEOUT_S)
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            with self._socket, self._answers:
                self.returncode = int(self._answers.readline())
        return self.returncode

    def wait(self, timeout: float) -> int:
        give_up_at = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired("a forked server", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@contextmanager
def fork_server() -> Iterator[None]:
    """Start the fork server of a session. It imports at the first request, and ends with its parent."""
    from inference_server.__main__ import ENVIRONMENT  # the fork server itself must not have imported it

    with tempfile.TemporaryDirectory() as directory:
        os.environ[ADDRESS] = str(Path(directory, "socket"))
        command, environment = [sys.executable, "-m", __name__], ENVIRONMENT | os.environ
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe) as process:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
            process.stdin.close()


def _serve(listener: socket.socket) -> None:
    clients: dict[int, socket.socket] = {}
    while sys.stdin not in (ready := select.select([sys.stdin, listener], [], [], 0.05)[0]):
        if ready:
            client, _ = listener.accept()
            with client.makefile("rb") as request:
                start = msgspec.json.decode(request.readline(), type=Start)
            _preload()
            if (pid := os.fork()) == 0:
                for open_socket in (listener, client, *clients.values()):
                    open_socket.close()
                _live(start)
            clients[pid] = client
            client.sendall(b"%d\n" % pid)
        for pid in [*clients]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with clients.pop(pid) as client:
                    client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _preload() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    import setproctitle

    setproctitle.getproctitle()  # must run before the environment moves, or it cannot find the title's memory


def _live(start: Start) -> None:
    code = 1
    try:
        os.setsid()
        log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.environ.clear()
        os.environ.update(start.environment)
        multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")
        sys.argv = [start.program, *start.arguments]
        runpy.run_module(start.program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen()
        print("ready", flush=True)
        _serve(listener)
