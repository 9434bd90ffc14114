"""Two learner processes at one server: the second waits and says for whom, and neither takes anything from the other."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference_server.config import ServerConfig
from learner.config import LearnerRun
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import ServerThread
from tests.learner.model_engine import ModelEngine
from tests.learner.mortal_learner import Life
from tests.learner.runs import make_run, metrics_of, rows_of
from tests.learner.test_several_servers import wait_until_free

TIMEOUT_S = 60.0
HELD_FROM = 2


class HoldsBack(ModelEngine):
    """Gives no completion of this version of the first run until it is told to."""

    def __init__(self) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.is_holding = False

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        if version == HELD_FROM and not self.is_holding:
            self.is_holding = True
            self.release.clear()


def a_server() -> ServerThread:
    """That keeps itself for a lost learner for longer than a test takes."""
    model = fingerprint(resolve_model("tiny:digits"))
    return ServerThread(HoldsBack(), model=model, config=ServerConfig(orphan_timeout_s=1000.0))


def let_go(server: ServerThread) -> None:
    server._loop.call_soon_threadsafe(server.engine.release.set)


def until(is_so: Callable[[], bool], life: Life) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up_at and life.process.is_alive(), life.log
        time.sleep(0.02)


def has_said(life: Life, text: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # before its first word
        return text in life.log
    return False


def run_at(path: Path, server: ServerThread, **learner: Any) -> LearnerRun:
    path.mkdir()
    return make_run(path, server.endpoint, **{"steps": 6, "connect_timeout_s": 2 * TIMEOUT_S} | learner)


def tenancy(server: ServerThread) -> dict[str, Any]:
    return server.running.server.status()["tenancy"]


@pytest.mark.parametrize(
    "is_killed", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, id="killed and resumed meanwhile")]
)
def test_a_second_run_waits_for_the_first_and_is_served_as_soon_as_that_is_over(
    tmp_path: Path, is_killed: bool
) -> None:
    with a_server() as server:
        first_run, second_run = run_at(tmp_path / "one", server), run_at(tmp_path / "two", server)
        first = Life(first_run, resume=False)
        until(lambda: server.engine.version == HELD_FROM, first)
        name = tenancy(server)["run"]
        if is_killed:
            assert first.process.pid is not None
            os.kill(first.process.pid, signal.SIGKILL)
            first.end()
            deadline = time.monotonic() + TIMEOUT_S
            while tenancy(server)["state"] != "away":
                assert time.monotonic() < deadline
                time.sleep(0.02)
        second = Life(second_run, resume=False)
        until(lambda: has_said(second, "is not free: the server is"), second)
        assert (f"kept for run {name}" if is_killed else f"busy with run {name}") in second.log
        if is_killed:
            first = Life(first_run, resume=True)
            until(lambda: tenancy(server)["state"] == "held", first)
            assert tenancy(server)["run"] == name
        let_go(server)
        assert first.end() == 0, first.log
        assert second.end() == 0, second.log
        assert second.log.count("is not free") == 1 and "lost the server" not in first.log + second.log
        wait_until_free(server)
        status = server.running.server.status()
        assert (status["policy_version"], status["weights_run"] == name) == (6, False)
    for run in (first_run, second_run):
        assert rows_of(run, "count(*)", "state = 'consumed'") == [(18,)] and metrics_of(run)[-1]["step"] == 6


def test_a_second_process_of_a_run_is_reported_and_takes_nothing_from_the_first(tmp_path: Path) -> None:
    with a_server() as server:
        first_run = run_at(tmp_path / "one", server)
        copied_run = run_at(tmp_path / "copy", server, connect_timeout_s=2)
        first = Life(first_run, resume=False)
        until(lambda: server.engine.version == HELD_FROM, first)
        Path(copied_run.run_dir).mkdir()
        Path(copied_run.run_dir, "run_id").write_bytes(Path(first_run.run_dir, "run_id").read_bytes())
        holder, server_id = tenancy(server)["learner"], server.running.server.status()["server_id"]
        second = Life(copied_run, resume=False)
        assert second.end() == 2
        assert f"another process of run {tenancy(server)['run']} has held the server" in second.log
        assert f"{holder} (host:process id)" in second.log and holder.endswith(f":{first.process.pid}")
        assert "learner.connect_timeout_s" in second.log
        assert tenancy(server)["learner"] == holder and server.running.server.status()["server_id"] == server_id
        let_go(server)
        assert first.end() == 0, first.log
    assert "lost the server" not in first.log and "connected to the same server" not in first.log
    assert rows_of(first_run, "max(attempt), count(*)", "state = 'consumed'") == [(0, 18)]
