"""Two learner processes at one server: the second waits and says for whom, and neither takes anything from the other."""

import contextlib
import os
import signal
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
from tests.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.system

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


def run_at(path: Path, server: ServerThread) -> LearnerRun:
    path.mkdir()
    return make_run(path, server.endpoint, steps=6, connect_timeout_s=2 * TIMEOUT_S)


def has_said(life: Life, text: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # before its first word
        return text in life.log
    return False


def test_a_second_run_waits_for_the_first_also_while_that_is_away_and_is_served_as_soon_as_it_is_over(
    tmp_path: Path,
) -> None:
    # It keeps itself for a lost learner for longer than a test takes.
    model, config = fingerprint(resolve_model("tiny:digits")), ServerConfig(orphan_timeout_s=1000.0)
    with ServerThread(HoldsBack(), model=model, config=config) as server:

        def tenancy() -> dict[str, Any]:
            return server.running.server.status()["tenancy"]

        def until_alive(life: Life, is_so: Callable[[], bool]) -> None:
            until(lambda: is_so() or life.process.exitcode is not None)
            assert is_so(), life.log

        first_run, second_run = run_at(tmp_path / "one", server), run_at(tmp_path / "two", server)
        first = Life(first_run, resume=False)
        until_alive(first, lambda: server.engine.version == HELD_FROM)
        name = tenancy()["run"]
        assert tenancy()["learner"].endswith(f":{first.process.pid}")
        assert first.process.pid is not None
        os.kill(first.process.pid, signal.SIGKILL)
        first.end()
        until(lambda: tenancy()["state"] == "away")
        second = Life(second_run, resume=False)
        until_alive(second, lambda: has_said(second, "is not free: the server is"))
        assert f"kept for run {name}" in second.log
        first = Life(first_run, resume=True)
        until_alive(first, lambda: tenancy()["state"] == "held")
        assert tenancy()["run"] == name
        server._loop.call_soon_threadsafe(server.engine.release.set)
        assert first.end() == 0, first.log
        assert second.end() == 0, second.log
        assert second.log.count("is not free") == 1 and "lost the server" not in first.log + second.log
        until(lambda: tenancy()["state"] == "free")
        status = server.running.server.status()
        assert (status["policy_version"], status["weights_run"] == name) == (6, False)
    for run in (first_run, second_run):
        assert rows_of(run, "count(*)", "state = 'consumed'") == [(18,)] and metrics_of(run)[-1]["step"] == 6
