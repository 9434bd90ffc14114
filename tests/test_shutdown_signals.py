"""Servers in processes of their own that are told to end under a run: they end with 0, and the learner goes on without a warning."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from learner.config import LearnerRun
from learner.report.records import read_events
from protocol.config import to_toml
from tests.chaos.audit import audit_prompts
from tests.coming_and_going import wait_until_told
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.runs import make_run, metrics_of
from tests.ports import free_endpoint

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 150.0
WITHOUT_END = 100_000
"""Steps of a run that is interrupted."""
NOISE = ("lost the server", "failed", "waiting for it to return", "Traceback")


class Server:
    """`python -m tests.model_server`, which ends as `inference-server` does."""

    def __init__(self, endpoint: str, log: Path) -> None:
        self.endpoint, self._log = endpoint, log
        with log.open("a") as output:
            command = [sys.executable, "-m", "tests.model_server", endpoint]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def tell_to_end(self) -> None:
        """Return once it has ended."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(TIMEOUT_S) == 0, self.log
        assert "draining for up to 60 s (server.drain_timeout_s)" in self.log and "drained" in self.log


class LearnerOf:
    """A run without end, in a process of its own."""

    def __init__(self, run: LearnerRun, directory: Path) -> None:
        self.run, self._log = run, directory / "learner.log"
        config = directory / "run.toml"
        config.write_text(to_toml(run))
        self._log.touch()
        self._process = start_learner(("train", str(config)), self._log, self._log)
        self._timeline = Path(run.run_dir) / "timeline.jsonl"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_until_told(self, what: str) -> None:
        wait_until_told(self._timeline, what, self._log)

    def wait_for_steps_with(self, server: Server, num_times: int) -> None:
        """Until the server has become ready so often, and some steps more."""
        told, give_up_at = f"the server at {server.endpoint}: syncing → ready", time.monotonic() + TIMEOUT_S
        while (
            not self._timeline.exists() or [event.what for event in read_events(self._timeline)].count(told) < num_times
        ):
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.05)
        wanted = self.num_steps + 5
        while self.num_steps < wanted:
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.05)

    @property
    def num_steps(self) -> int:
        path = Path(self.run.run_dir) / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def interrupt(self) -> None:
        """End it in order; every prompt was consumed once by then."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)
        assert end_of(self._process, self._log) == 0, self.log
        config = self.run.learner
        audit = audit_prompts(
            Path(self.run.run_dir) / "ledger.db", num_steps=metrics_of(self.run)[-1]["step"],
            groups_per_step=config.groups_per_step, num_prompts=config.data.num_prompts or 0, seed=self.run.seed,
        )  # fmt: skip
        assert not (audit.lost or audit.duplicated or audit.overtaken)
        assert [line for line in self.log.splitlines() if any(word in line for word in NOISE)] == []

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def run_on(directory: Path, *names: str) -> Iterator[tuple[LearnerOf, list[Server]]]:
    """A run on servers of these names, all of which have worked."""
    servers = [Server(free_endpoint(), directory / f"{name}.log") for name in names]
    run = make_run(directory, *(server.endpoint for server in servers), steps=WITHOUT_END, connect_timeout_s=120)
    learner = LearnerOf(run, directory)
    try:
        for server in servers:
            learner.wait_for_steps_with(server, 1)
        yield learner, servers
    finally:
        learner.kill()
        for server in servers:
            server.process.kill()
            server.process.wait(TIMEOUT_S)


@pytest.mark.slow
def test_one_of_two_servers_is_shut_down_and_another_comes_to_its_place(tmp_path: Path) -> None:
    with run_on(tmp_path, "first", "second") as (learner, servers):
        first = servers[0]
        num_steps = learner.num_steps
        first.tell_to_end()
        learner.wait_until_told(f"the server at {first.endpoint}: draining → gone")
        servers.append(Server(first.endpoint, tmp_path / "third.log"))
        learner.wait_for_steps_with(first, 2)
        assert learner.num_steps > num_steps
        learner.interrupt()
        assert "no other server is connected" not in learner.log
        assert metrics_of(learner.run)[-1]["servers/ready"] == 2


def test_the_only_server_is_shut_down_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with run_on(tmp_path, "first") as (learner, servers):
        first = servers[0]
        first.tell_to_end()
        learner.wait_until_told(f"the server at {first.endpoint}: draining → gone")
        servers.append(Server(first.endpoint, tmp_path / "second.log"))
        learner.wait_for_steps_with(first, 2)
        learner.interrupt()
        assert (
            sum("is shutting down and no other server is connected" in line for line in learner.log.splitlines()) == 1
        )
