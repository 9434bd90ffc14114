"""The supervisor of a node when one of its processes ends, with fake processes that record their signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from deploy.placement import DeployConfig
from deploy.supervisor import SupervisedProcess, Supervisor
from inference_server.engine.interface import EngineDead
from protocol.console import exit_on_user_error
from protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    PushError,
    PushIncomplete,
    PushInterrupted,
    RankFailed,
    ServerLost,
    SlipstreamError,
)
from protocol.signals import SHUTDOWN_SIGNALS
from tests.deploy.supervised import Spec

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 40.0
SERVERS = {"server0": ["serve"], "server1": ["serve"]}
NOISY = "import sys; sys.stdout.buffer.write(b'caf\\xe9\\n'); print('.' * 200_000)"
WITH_A_NOISY_PART = """
import sys, time
from pathlib import Path
from deploy.supervisor import SupervisedProcess
process = SupervisedProcess("server", [sys.executable, "-S", "-c", sys.argv[1]], {}, Path(sys.argv[2]))
process.wait(time.monotonic() + 30)
sys.exit(process.returncode)
"""
ON_FAILURE = DeployConfig(restart="on-failure", max_restarts=2)


class Supervised:
    """A supervisor and its fake parts."""

    def __init__(
        self,
        directory: Path,
        ranks: dict[str, list[str]],
        servers: dict[str, list[str]] = SERVERS,
        config: DeployConfig = DeployConfig(),  # noqa: B008  (frozen)
    ) -> None:
        self.directory = directory
        spec = Spec(directory=str(directory), servers=servers, ranks=ranks, deploy=config)
        (directory / "spec.json").write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "tests.deploy.supervised", str(directory / "spec.json")]
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def wait_for(self, *events: str) -> None:
        give_up_at = time.monotonic() + TIMEOUT_S
        while not set(events) <= set(self.events):
            assert time.monotonic() < give_up_at, f"not all of {events} are among {self.events}"
            time.sleep(0.02)

    def end(self) -> int:
        self.output, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode

    @property
    def events(self) -> list[str]:
        path = self.directory / "events"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def later_events(self) -> list[str]:
        return [event for event in self.events if not event.endswith(" started")]

    def is_alive(self, name: str) -> bool:
        return psutil.pid_exists(int((self.directory / f"{name}.pid").read_text()))


def test_servers_end_after_the_learner_and_its_exit_code_is_returned(tmp_path: Path) -> None:
    run = Supervised(tmp_path, {"learner0": ["end 0"], "learner1": ["end 0"]})
    assert run.end() == 0
    assert sorted(run.later_events[:2]) == ["learner0 ended", "learner1 ended"]
    assert sorted(run.later_events[2:]) == ["server0 SIGTERM", "server1 SIGTERM"]
    for name in ("server0", "server1", "learner0"):
        assert f"{name:>8} | {name} says hello\n" in run.output
        assert (tmp_path / f"{name}.log").read_text() == f"{name} says hello\n"


def test_the_end_of_a_server_ends_the_learner_and_then_the_other_servers(tmp_path: Path) -> None:
    run = Supervised(tmp_path, {"learner": ["serve"]}, {"server0": ["end 3"], "server1": ["serve"]})
    assert run.end() == 1
    assert run.later_events == ["server0 ended", "learner SIGTERM", "server1 SIGTERM"]
    assert "server0 exited with code 3; stopping all processes" in run.output


def test_after_a_failed_rank_the_others_get_time_and_then_everything_ends(tmp_path: Path) -> None:
    run = Supervised(tmp_path, {"learner0": ["deaf"], "learner1": ["end 7"], "learner2": ["end 2 learner1"]})
    assert run.end() == 7
    assert run.later_events[:2] == ["learner1 ended", "learner2 ended"]
    assert {"server0 SIGTERM", "server1 SIGTERM"} == set(run.later_events[2:])
    assert not run.is_alive("learner0")


def test_a_server_restarts_up_to_the_limit(tmp_path: Path) -> None:
    run = Supervised(tmp_path, {"learner": ["serve"]}, {"server0": ["end 1"], "server1": ["serve"]}, ON_FAILURE)
    assert run.end() == 1
    assert run.events.count("server0 started") == 3 and run.events.count("server1 started") == 1
    assert "restarting it (2 of 2 within an hour)" in run.output
    assert "after 2 restarts within an hour (deploy.max_restarts); stopping all processes" in run.output
    assert run.events.index("learner SIGTERM") < run.events.index("server1 SIGTERM")


@pytest.mark.parametrize(
    ("ranks", "servers"),
    [
        ({"learner0": ["end 2"], "learner1": ["end 2"]}, {"server": ["serve"]}),
        ({"learner": ["serve"]}, {"server": ["end 2"]}),
    ],
    ids=["ranks", "server"],
)
def test_an_error_that_a_person_has_to_solve_ends_the_run_at_once(
    tmp_path: Path, ranks: dict[str, list[str]], servers: dict[str, list[str]]
) -> None:
    run = Supervised(tmp_path, ranks, servers, ON_FAILURE)
    assert run.end() == (2 if "learner0" in ranks else 1)
    assert not [event for event in run.events if event.endswith("resumed")]
    assert run.events.count("server started") == 1
    assert "exited with code 2, an error that a restart does not solve; stopping all processes" in run.output


def test_a_process_goes_on_when_its_log_is_gone_and_its_output_is_not_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log_file = tmp_path / "deleted/server.log"
    process = SupervisedProcess("server", [sys.executable, "-S", "-c", NOISY], {}, log_file)
    process.wait(time.monotonic() + TIMEOUT_S)
    assert process.returncode == 0
    assert capsys.readouterr().out == f"  server | caf\\xe9\n  server | {'.' * 200_000}\n"
    (warning,) = caplog.messages
    assert warning.startswith(f"output of server cannot be written to {log_file}: ")


def test_a_process_goes_on_when_the_reader_of_the_console_leaves(tmp_path: Path) -> None:
    log_file = tmp_path / "server.log"
    command = [sys.executable, "-c", WITH_A_NOISY_PART, NOISY, str(log_file)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read().startswith("the output cannot be written ([Errno 32] Broken pipe)")
    assert process.returncode == 0
    assert log_file.read_text() == f"caf\\xe9\n{'.' * 200_000}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDead, 1), (DeadlineExceeded, 1), (ServerLost, 1), (PushError, 1), (PushInterrupted, 1),
        (PushIncomplete, 2), (ConfigError, 2), (RankFailed, 2),
    ],
)  # fmt: skip
def test_an_error_that_a_restart_may_solve_ends_a_process_like_a_crash(error: type[SlipstreamError], code: int) -> None:
    """RankFailed: the rank that failed decides, with its own code."""
    with pytest.raises(SystemExit, match=f"^{code}$"), exit_on_user_error():
        raise error("it failed")


def test_ranks_restart_after_a_crash_although_the_others_end_with_a_message(tmp_path: Path) -> None:
    ranks = {"learner0": ["end 2", "end 0"], "learner1": ["end 1", "end 0"]}
    run = Supervised(tmp_path, ranks, {"server": ["serve"]}, ON_FAILURE)
    assert run.end() == 0 and {"learner0 resumed", "learner1 resumed"} <= set(run.events)


def test_all_ranks_restart_and_resume_after_a_failure_and_ctrl_c_ends_all(
    tmp_path: Path,
) -> None:
    ranks = {"learner0": ["deaf", "serve"], "learner1": ["end 1", "serve"]}
    run = Supervised(tmp_path, ranks, config=ON_FAILURE)
    run.wait_for("server0 started", "server1 started", "learner0 resumed", "learner1 resumed")
    assert not any("SIG" in event for event in run.events if event.startswith("server"))
    num_events = len(run.events)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    assert sorted(run.events[num_events:][:2]) == ["learner0 SIGINT", "learner1 SIGINT"]
    assert sorted(run.events[num_events:][2:]) == ["server0 SIGTERM", "server1 SIGTERM"]


def test_a_killed_supervisor_leaves_no_process_behind(tmp_path: Path) -> None:
    run = Supervised(tmp_path, {"learner": ["serve"]})
    names = ("server0", "server1", "learner")
    run.wait_for(*(f"{name} started" for name in names))
    run.process.kill()
    run.end()
    run.wait_for(*(f"{name} SIGTERM" for name in names))


class Rank:
    """A part that ends only at a signal, or if it `lasts`, when it is waited for."""

    returncode: int | None = None
    name = "learner"

    def __init__(self, *, lasts: bool = False) -> None:
        self.signals: list[int] = []
        self.lasts, self.patience_s = lasts, 0.0

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if not self.lasts:
            self.returncode = 0

    def wait(self, give_up_at: float) -> None:
        assert self.signals or self.returncode is not None
        self.patience_s = give_up_at - time.monotonic()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers of this process, which a supervisor replaces."""
    before = {number: signal.getsignal(number) for number in SHUTDOWN_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_ranks_get_one_signal_and_time_for_a_step_and_a_checkpoint_when_a_server_ends(is_interrupted: bool) -> None:
    server, rank = Rank(), Rank(lasts=True)

    def start(*, again: bool) -> Any:
        if is_interrupted:  # it gets the signal once it has started
            os.kill(os.getpid(), signal.SIGINT)
        server.returncode = 3
        return [rank]

    assert Supervisor({"server": lambda: server}, start, DeployConfig()).run() == 1
    assert rank.signals == [signal.SIGINT if is_interrupted else signal.SIGTERM]
    assert rank.patience_s > 600 > server.patience_s


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("is_restart", [False, True])
def test_a_signal_during_or_right_before_the_start_of_ranks_reaches_them(
    is_restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, rank = Rank(), Rank()
    dead.returncode = 1

    def interrupt(*_: object) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return True

    def start(*, again: bool) -> Any:
        if is_restart and not again:
            return [dead]
        if not is_restart:
            interrupt()
        return [rank]

    monkeypatch.setattr(Supervisor, "_may_restart", interrupt)
    assert Supervisor({}, start, ON_FAILURE).run() == 0
    assert rank.signals == [signal.SIGINT]
