"""Reward functions with an unreachable service: which errors count, how long the run waits, and what it logs."""

import json
import logging
import shutil
import socket
import tarfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from learner.config import RewardConfig
from learner.evaluation.openai_client import EvaluationError
from learner.rewards import call
from learner.rewards import workers as workers_module
from learner.rewards.call import is_unreachable
from learner.rewards.workers import RewardWorkers
from tests.learner.rewards.scored_groups import DEADLINE_S, STATE, prompt
from tests.ports import free_port
from tests.waiting import until

JUDGE = """
import json, os, urllib.request
import aiohttp

def judge(completions, **kwargs):
    body = json.dumps(completions).encode()
    with urllib.request.urlopen(os.environ["JUDGE_URL"], body, timeout=5) as answer:
        return json.loads(answer.read())

async def judge_too(completions, **kwargs):
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(os.environ["JUDGE_URL"], json=completions) as answer:
            return await answer.json(content_type=None)
"""


class Judge(ThreadingHTTPServer):
    """Returns the length of each completion, or a status."""

    status = 200
    num_asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        self.server.num_asked += 1
        completions = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(json.dumps([float(len(text)) for text in completions]).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def judging(port: int) -> Iterator[Judge]:
    with Judge(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    (tmp_path / "judge.py").write_text(JUDGE)
    port = free_port()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(call, "FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(call, "LONGEST_RETRY_S", 0.3)
    return port


@pytest.mark.parametrize("name", ["judge", "judge_too"])
def test_the_run_waits_for_an_unreachable_service_and_every_group_gets_its_reward(
    tmp_path: Path, port: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    functions = (f"{tmp_path}/judge.py:{name}", "exact_match")
    with RewardWorkers(RewardConfig(functions=functions, unreachable_s=60)) as workers:
        groups = [workers.submit(prompt(answer="12"), ["12", "1234"], [[1], [2]], STATE) for _ in range(3)]
        until(lambda: "cannot reach its service" in caplog.text)
        assert not any(group.done() for group in groups)
        with judging(port) as server:
            results = [group.result(DEADLINE_S) for group in groups]
            server.status = 503
            late = workers.submit(prompt(answer="12"), ["12"], [[1]], STATE)
            until(lambda: server.num_asked > 4)
            assert not late.done()
            server.status = 200
            assert late.result(DEADLINE_S).rewards == [3.0]
    assert [result.rewards for result in results] == [[3.0, 4.0]] * 3
    assert all(function.outcome == "ok" for result in results for function in result.functions)
    assert caplog.text.count(f"reward function {name} cannot reach its service: it raised") == 2, "once per outage"
    assert caplog.text.count(f"reward function {name} reaches its service again") == 2


def test_a_service_that_stays_unreachable_fails_at_the_deadline(tmp_path: Path, port: int) -> None:
    with RewardWorkers(RewardConfig(functions=(f"{tmp_path}/judge.py:judge",), unreachable_s=0.5)) as workers:
        began_at = time.monotonic()
        (function,) = workers.submit(prompt(), ["12"], [[1]], STATE).result(DEADLINE_S).functions
    assert function.outcome == "unreachable" and time.monotonic() - began_at > 0.5
    assert "start the service that it calls, or raise learner.reward.unreachable_s" in (function.message or "")


def test_groups_that_wait_for_a_service_need_no_thread_each(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "FIRST_RETRY_S", 300.0)
    monkeypatch.setattr(call, "LONGEST_RETRY_S", 300.0)
    with RewardWorkers(RewardConfig(functions=(f"{tmp_path}/judge.py:judge_too",))) as workers:
        num_threads = threading.active_count()
        groups = [workers.submit(prompt(), ["12"], [[1]], STATE) for _ in range(40)]
        until(lambda: len(workers._retries._jobs) == len(groups))
        assert threading.active_count() == num_threads
    assert all(group.exception(DEADLINE_S) is not None for group in groups)


def test_a_group_whose_result_cannot_be_computed_ends_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_total", lambda *arguments: 1 // 0)
    with RewardWorkers(RewardConfig(functions=("exact_match",))) as workers:
        group = workers.submit(prompt(answer="12"), ["12"], [[1]], STATE)
        assert isinstance(group.exception(DEADLINE_S), ZeroDivisionError)


def test_closed_workers_retry_no_call(tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture) -> None:
    workers = RewardWorkers(RewardConfig(functions=(f"{tmp_path}/judge.py:judge",)))
    group = workers.submit(prompt(), ["12"], [[1]], STATE)
    until(lambda: "cannot reach its service" in caplog.text)
    workers.close()
    with judging(port) as server:
        time.sleep(0.6)
        assert group.exception(DEADLINE_S) is not None and server.num_asked == 0


def of_library(name: str) -> Exception:
    return type(name, (Exception,), {})("no")


def with_status(status: int, where: str = "status_code") -> Exception:
    error: Any = RuntimeError("no")
    setattr(error, where, SimpleNamespace(status_code=status) if where == "response" else status)
    return error


def caused_by(cause: Exception) -> Exception:
    error = RuntimeError("the judge failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("refused"), ConnectionResetError("reset"),
        socket.gaierror("no such name"),
        urllib.error.URLError(ConnectionRefusedError("refused")), urllib.error.URLError(BrokenPipeError("pipe")),
        httpx.ConnectError("no"), httpx.ReadError("no"), httpx.WriteError("no"),
        *(of_library(name) for name in sorted(call.UNREACHABLE_ERRORS)),
        with_status(429), with_status(503, "status"), with_status(502, "code"), with_status(504, "response"),
        caused_by(ConnectionRefusedError("refused")), caused_by(with_status(503)),
    ],
    ids=repr,
)  # fmt: skip
def test_connection_errors_count_as_an_unreachable_service(error: Exception) -> None:
    assert is_unreachable(error)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("answer"), ValueError("no number"), with_status(400), with_status(401, "status"), with_status(500),
        FileNotFoundError("x"), BrokenPipeError("a program"), caused_by(BrokenPipeError("a program")),
        tarfile.ReadError("no archive"), shutil.ReadError("no archive"),
        urllib.error.URLError("unknown url type"), caused_by(KeyError("x")), EvaluationError("no"),
        TimeoutError("late"),
    ],
    ids=repr,
)  # fmt: skip
def test_other_errors_do_not_count_as_an_unreachable_service(error: Exception) -> None:
    assert not is_unreachable(error)
