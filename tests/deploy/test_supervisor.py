"""What becomes of the others when a process of a node ends, with processes that only note what is done to them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.placement import DeployConfig
from deploy.supervisor import Supervisor
from protocol.signals import SHUTDOWN_SIGNALS
from tests.deploy.supervised import Spec

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 40.0
SERVERS = {"server0": ["serve"], "server1": ["serve"]}
ON_FAILURE = DeployConfig(restart="on-failure", max_restarts=2)


class Supervised:
    """A supervisor and its parts."""

    def __init__(
        self, directory: Path, ranks: dict[str, list[str]], servers: dict[str, list[str]], config: DeployConfig
    ) -> None:
        self.directory = directory
        spec = Spec(directory=str(directory), servers=servers, ranks=ranks, deploy=config)
        (directory / "spec.json").write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "tests.deploy.supervised", str(directory / "spec.json")]
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def wait_for(self, event: str) -> None:
        give_up_at = time.monotonic() + TIMEOUT_S
        while event not in self.events:
            assert time.monotonic() < give_up_at, f"no {event!r} among {self.events}"
            time.sleep(0.02)

    def end(self) -> int:
        self.output, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode

    @property
    def events(self) -> list[str]:
        path = self.directory / "events"
        return path.read_text().splitlines() if path.exists() else []

    def pid(self, name: str) -> int:
        return int((self.directory / f"{name}.pid").read_text())


def supervised(
    directory: Path,
    ranks: dict[str, list[str]],
    servers: dict[str, list[str]] = SERVERS,
    config: DeployConfig = DeployConfig(),  # noqa: B008  (frozen)
) -> Supervised:
    return Supervised(directory, ranks, servers, config)


def after_the_start(events: list[str]) -> list[str]:
    return [event for event in events if not event.endswith(" started")]


def test_servers_are_ended_when_the_learner_has_and_its_exit_code_is_returned(tmp_path: Path) -> None:
    run = supervised(tmp_path, {"learner0": ["end 0"], "learner1": ["end 0"]})
    assert run.end() == 0
    ranks, servers = after_the_start(run.events)[:2], after_the_start(run.events)[2:]
    assert sorted(ranks) == ["learner0 ended", "learner1 ended"]
    assert sorted(servers) == ["server0 SIGTERM", "server1 SIGTERM"]


def test_lines_are_prefixed_and_logged(tmp_path: Path) -> None:
    run = supervised(tmp_path, {"learner": ["end 0"]})
    assert run.end() == 0
    for name in ("server0", "server1", "learner"):
        assert f"{name:>8} | {name} says hello\n" in run.output
        assert (tmp_path / f"{name}.log").read_text() == f"{name} says hello\n"


def test_a_server_that_ends_ends_the_learner_and_then_the_other_servers(tmp_path: Path) -> None:
    run = supervised(tmp_path, {"learner": ["serve"]}, {"server0": ["end 3"], "server1": ["serve"]})
    assert run.end() == 1
    assert after_the_start(run.events) == ["server0 ended", "learner SIGTERM", "server1 SIGTERM"]
    assert "server0 exited with code 3; stopping all processes" in run.output


def test_a_rank_that_fails_leaves_the_others_time_and_then_everything_ends(tmp_path: Path) -> None:
    run = supervised(tmp_path, {"learner0": ["deaf"], "learner1": ["end 7"]})
    assert run.end() == 7
    assert after_the_start(run.events)[0] == "learner1 ended"
    assert {"server0 SIGTERM", "server1 SIGTERM"} == set(after_the_start(run.events)[1:])
    with pytest.raises(ProcessLookupError):
        os.kill(run.pid("learner0"), 0)


def test_a_server_is_started_again_as_often_as_it_may_be(tmp_path: Path) -> None:
    run = supervised(tmp_path, {"learner": ["serve"]}, {"server0": ["end 1"], "server1": ["serve"]}, ON_FAILURE)
    assert run.end() == 1
    assert run.events.count("server0 started") == 3 and run.events.count("server1 started") == 1
    assert "restarting it (2 of 2 within an hour)" in run.output
    assert "after 2 restarts within an hour (deploy.max_restarts); stopping all processes" in run.output
    assert run.events.index("learner SIGTERM") < run.events.index("server1 SIGTERM")


def test_all_ranks_are_started_again_to_resume_when_one_has_failed(tmp_path: Path) -> None:
    ranks = {"learner0": ["deaf", "serve"], "learner1": ["end 1", "serve"]}
    run = supervised(tmp_path, ranks, config=ON_FAILURE)
    run.wait_for("learner0 started")
    first = run.pid("learner0")
    run.wait_for("learner0 resumed")
    run.wait_for("learner1 resumed")
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert not [event for event in run.events if event.startswith("server") and "SIG" in event]
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0


def test_ctrl_c_reaches_every_rank_and_starts_nothing_again(tmp_path: Path) -> None:
    run = supervised(tmp_path, {"learner0": ["serve"], "learner1": ["serve"]}, config=ON_FAILURE)
    for name in ("server0", "server1", "learner0", "learner1"):
        run.wait_for(f"{name} started")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    events = after_the_start(run.events)
    assert sorted(events[:2]) == ["learner0 SIGINT", "learner1 SIGINT"]
    assert sorted(events[2:]) == ["server0 SIGTERM", "server1 SIGTERM"]


class Rank:
    """Ends at a signal, and only then."""

    returncode: int | None = None
    name = "learner"

    def __init__(self) -> None:
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)
        self.returncode = 0

    def wait(self, give_up_at: float) -> None:
        assert self.returncode is not None


@pytest.mark.timeout(30)
def test_a_signal_that_comes_while_ranks_are_being_started_reaches_them() -> None:
    handlers = {number: signal.getsignal(number) for number in SHUTDOWN_SIGNALS}
    rank = Rank()

    def start(*, again: bool) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return [rank]

    try:
        assert Supervisor({}, start, ON_FAILURE).run() == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert rank.signals == [signal.SIGINT, signal.SIGTERM]


def test_a_signal_that_comes_before_a_restart_reaches_the_new_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {number: signal.getsignal(number) for number in SHUTDOWN_SIGNALS}
    dead, rank = Rank(), Rank()
    dead.returncode = 1
    ranks = iter([dead, rank])
    supervisor = Supervisor({}, lambda *, again: [next(ranks)], ON_FAILURE)  # type: ignore[arg-type, list-item]

    def may_restart(name: str, ended: str) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return True

    monkeypatch.setattr(supervisor, "_may_restart", may_restart)
    try:
        assert supervisor.run() == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert rank.signals == [signal.SIGINT, signal.SIGTERM]


def test_a_killed_supervisor_leaves_nobody_behind(tmp_path: Path) -> None:
    run = supervised(tmp_path, {"learner": ["serve"]})
    names = ("server0", "server1", "learner")
    for name in names:
        run.wait_for(f"{name} started")
    run.process.kill()
    run.end()
    for name in names:
        run.wait_for(f"{name} SIGTERM")
