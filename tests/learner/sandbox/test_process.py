"""The life of a process that runs user code, however it is started: it answers, fails, is killed, and ends with the learner."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import msgspec
import psutil
import pytest

from learner.sandbox.pool import MemoryWatch
from learner.sandbox.process import MAX_CHILDREN, PipeProcess, ProcessFailure, SandboxLimits
from protocol.signals import SHUTDOWN_SIGNALS
from tests.learner.sandbox.service import LARGE, forked, spawned

ROOT = Path(__file__).parents[3]
DEADLINE_S, SHORT_S = 60.0, 0.5
TEXT = msgspec.msgpack.Decoder(str)
LIMITS = SandboxLimits(section="learner.test", processes_key="num_tests", timeout_s=SHORT_S, max_memory_mib=200)
WAYS = {"spawned": spawned, "forked": forked}


@pytest.fixture(autouse=True, scope="module")
def no_fork_server_of_others() -> None:
    """The server of another test file may have been started without shielding it from signals."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(params=WAYS)
def process(request: pytest.FixtureRequest) -> Iterator[PipeProcess]:
    process = PipeProcess(*WAYS[request.param](), LIMITS)
    assert process.ask("hello", TEXT, DEADLINE_S, "") == "hello"
    yield process
    process.kill()


def failure_of(process: PipeProcess, command: str, timeout_s: float = DEADLINE_S) -> ProcessFailure:
    failure = process.ask(command, TEXT, timeout_s, "make it faster")
    assert isinstance(failure, ProcessFailure) and not process.is_usable
    return failure


@pytest.mark.parametrize(
    ("command", "outcome", "message"),
    [
        ("exit", "failed", "ended its process with exit code 3; correct its code"),
        ("close", "failed", "closed the pipe of its process; correct its code"),
        ("nonsense", "failed", "wrote an invalid answer into the pipe of its process (MessagePack data is malformed"),
        ("die", "killed", "lost its process to signal 9 (Killed); check the memory of the machine, and see learner.test.max_memory_mib and num_tests"),
    ],
)  # fmt: skip
def test_a_process_that_ends_or_writes_nonsense_is_a_failure_with_the_reason(
    process: PipeProcess, command: str, outcome: str, message: str
) -> None:
    failure = failure_of(process, command)
    assert failure.outcome == outcome and failure.message.startswith(message)


def test_a_process_that_does_not_answer_is_killed_at_the_deadline(process: PipeProcess) -> None:
    started = time.monotonic()
    failure = failure_of(process, "spin", SHORT_S)
    assert failure.message == "did not return within 0.5 s and was killed; make it faster"
    assert failure.outcome == "timed_out" and time.monotonic() - started < 10
    wait_until_gone(process.pid)


def stopped(process: PipeProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)


def test_a_stopped_process_is_killed_at_the_deadline(process: PipeProcess) -> None:
    stopped(process)
    assert failure_of(process, "hello", SHORT_S).outcome == "timed_out"


def test_a_stopped_process_is_killed_when_its_pipe_is_full(process: PipeProcess) -> None:
    stopped(process)
    failure = failure_of(process, "hello " + "x" * LARGE)
    assert failure.outcome == "timed_out" and "raise learner.test.timeout_s" in failure.remedy


def test_a_process_that_is_stopped_while_it_writes_is_killed_at_the_deadline(process: PipeProcess) -> None:
    process.send("write")
    assert process._pipe.poll(DEADLINE_S)
    stopped(process)
    failure = process.receive(TEXT, DEADLINE_S)
    assert isinstance(failure, ProcessFailure) and failure.outcome == "timed_out" and not process.is_usable


@pytest.mark.parametrize("command", ["hoard", "share"])
def test_a_process_that_uses_too_much_memory_with_what_it_has_started_is_killed(
    process: PipeProcess, command: str
) -> None:
    watch = MemoryWatch(LIMITS.max_memory_mib, lambda: [process])
    try:
        failure = failure_of(process, command)
    finally:
        watch.close()
    assert failure.outcome == "failed" and failure.message == (
        "used more than 200 MiB of memory and was killed; make it and what it starts use less or raise learner.test.max_memory_mib"
    )


def test_what_a_process_has_started_is_killed_with_it_in_whatever_session(process: PipeProcess) -> None:
    started = process.ask("start", TEXT, DEADLINE_S, "")
    assert isinstance(started, str)
    failure_of(process, "spin", SHORT_S)
    wait_until_gone(int(started))


def test_a_pool_with_a_process_for_each_core_is_not_too_many() -> None:
    assert max(128, 2 * (os.cpu_count() or 1)) <= MAX_CHILDREN


def test_a_process_with_many_left_behind_is_not_used_again(
    process: PipeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.sandbox.process.MAX_CHILDREN", 2)
    started = list[int]()
    for _ in range(3):
        assert process.is_usable
        answer = process.ask("start", TEXT, DEADLINE_S, "")
        assert isinstance(answer, str)
        started.append(int(answer))
    assert not process.is_usable
    process.close()
    for pid in started:
        wait_until_gone(pid)


def test_a_process_may_be_killed_by_another_thread_and_the_call_returns(process: PipeProcess) -> None:
    threading.Timer(SHORT_S, process.kill).start()
    assert failure_of(process, "spin").outcome == "killed"
    process.kill()


def test_a_process_with_a_pending_answer_is_not_used_again(process: PipeProcess) -> None:
    process.has_pending_answer = True
    assert not process.is_usable
    process.has_pending_answer = False
    assert process.is_usable


@pytest.mark.parametrize("number", SHUTDOWN_SIGNALS)
def test_signals_to_end_are_left_to_the_learner(process: PipeProcess, number: signal.Signals) -> None:
    os.kill(process.pid, number)
    assert process.ask("hello", TEXT, DEADLINE_S, "") == "hello" and process.is_usable


@pytest.mark.parametrize("process", ["forked"], indirect=True)
@pytest.mark.parametrize("number", SHUTDOWN_SIGNALS)
def test_signals_to_end_leave_the_fork_server_alone(process: PipeProcess, number: signal.Signals) -> None:
    """Without it, the learner would lose track of every forked process, and take each for ended."""
    os.kill(forkserver._forkserver._forkserver_pid, number)  # type: ignore[attr-defined]
    time.sleep(0.2)
    assert process.ask("hello", TEXT, DEADLINE_S, "") == "hello" and process.is_usable


def test_what_a_process_prints_is_no_part_of_a_commands_answer(
    process: PipeProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    assert process.ask("print", TEXT, DEADLINE_S, "") == "print"
    assert capfd.readouterr().out == ""


LEARNER = """
import time
from learner.sandbox.process import PipeProcess
from tests.learner.sandbox.test_process import LIMITS, TEXT, WAYS
if __name__ == "__main__":
    process = PipeProcess(*WAYS["{way}"](), LIMITS)
    print(process.pid, process.ask("start", TEXT, 60.0, ""), flush=True)
    process.send("spin")
    time.sleep(600)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_process_and_what_it_has_started_end_with_the_learner_in_the_middle_of_a_call(
    tmp_path: Path, way: str
) -> None:
    script = tmp_path / "learner_of_test.py"
    script.write_text(LEARNER.format(way=way))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environ, cwd=ROOT) as learner:
        assert learner.stdout is not None
        pids = [int(pid) for pid in learner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        learner.kill()
    for pid in pids:
        wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up_at, f"process {pid} outlives what has started it"
        time.sleep(0.05)
