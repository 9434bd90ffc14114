"""The lifetime of a process with user code: it answers, fails, is killed, and ends with the learner.

Reward functions, environments and agents run in such processes. Their own tests cover only how they handle failures.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from learner.sandbox.descendants import ProcessEntry
from learner.sandbox.pool import MemoryWatch
from learner.sandbox.process import PipeProcess, ProcessFailure
from protocol.signals import SHUTDOWN_SIGNALS
from tests.learner.sandbox.processes import wait_until_gone
from tests.learner.sandbox.service import DEADLINE_S, LARGE, LIMITS, SHORT_S, TEXT, WAYS, service

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
forked_alone = pytest.mark.parametrize("process", ["forked"], indirect=True)
"""For tests in which the way to start the process makes no difference."""


@pytest.fixture(params=WAYS)
def process(request: pytest.FixtureRequest) -> Iterator[PipeProcess]:
    process = service(request.param)
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
        ("die", "killed", "lost its process to signal 9 (Killed); check the memory of the machine, and see "
                          "learner.test.max_memory_mib and num_tests"),
    ],
)  # fmt: skip
def test_a_process_that_ends_or_writes_nonsense_is_a_failure_with_the_reason(
    process: PipeProcess, command: str, outcome: str, message: str
) -> None:
    failure = failure_of(process, command)
    assert failure.outcome == outcome and failure.message.startswith(message)


def test_a_process_without_an_answer_is_killed_at_the_deadline_with_its_descendants(
    process: PipeProcess,
) -> None:
    started = process.ask("start", TEXT, DEADLINE_S, "")
    assert isinstance(started, str)
    failure = failure_of(process, "spin", SHORT_S)
    assert failure.message == "did not return within 0.5 s and was killed; make it faster"
    assert failure.outcome == "timed_out"
    wait_until_gone(process.pid, int(started))


@forked_alone
def test_a_stopped_process_is_killed_when_its_pipe_is_full(process: PipeProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    failure = failure_of(process, "hello " + "x" * LARGE)
    assert failure.outcome == "timed_out" and "raise learner.test.timeout_s" in failure.remedy


@forked_alone
def test_a_process_stopped_in_a_write_is_killed_at_the_deadline(process: PipeProcess) -> None:
    process.send("write")
    assert process._pipe.poll(DEADLINE_S)
    os.kill(process.pid, signal.SIGSTOP)
    failure = process.receive(TEXT, DEADLINE_S)
    assert isinstance(failure, ProcessFailure) and failure.outcome == "timed_out" and not process.is_usable


@forked_alone
def test_a_process_is_not_judged_by_the_memory_it_has_while_it_or_its_child_starts(
    process: PipeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it runs its own program, the child of a fork has the memory of its parent."""
    known: list[PipeProcess] = []
    seen = iter(
        [
            lambda: known.append(process) or GIB,  # it appears while the memory of all processes is read
            lambda: 0,
            lambda: GIB,  # and starts a child
            lambda: 0,
        ]
    )
    has_seen_all = threading.Event()

    def entries() -> dict[int, ProcessEntry]:
        num_bytes = next(seen, lambda: has_seen_all.set() or 0)()
        return {process.pid: ProcessEntry(parent=1, group=process.pid, resident_bytes=num_bytes)}

    monkeypatch.setattr("learner.sandbox.pool.all_processes", entries)
    watch = MemoryWatch(LIMITS.max_memory_mib, lambda: known)
    assert has_seen_all.wait(DEADLINE_S)
    watch.close()
    assert process.ask("hello", TEXT, DEADLINE_S, "") == "hello"


@pytest.mark.parametrize("process", ["spawned"], indirect=True)
@pytest.mark.parametrize("command", ["hoard", "share"])
def test_a_process_that_uses_too_much_memory_with_its_descendants_is_killed(process: PipeProcess, command: str) -> None:
    watch = MemoryWatch(LIMITS.max_memory_mib, lambda: [process])
    try:
        failure = failure_of(process, command)
    finally:
        watch.close()
    assert failure.outcome == "failed" and failure.message == (
        "used more than 200 MiB of memory and was killed; make it and what it starts use less or raise "
        "learner.test.max_memory_mib"
    )


@forked_alone
def test_a_process_with_many_orphans_is_not_reused(process: PipeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.sandbox.process.MAX_CHILDREN", 2)
    started = list[int]()
    for _ in range(3):
        assert process.is_usable
        answer = process.ask("start", TEXT, DEADLINE_S, "")
        assert isinstance(answer, str)
        started.append(int(answer))
    assert not process.is_usable
    process.close()
    wait_until_gone(*started)


def test_a_process_that_was_killed_before_the_call_is_a_failure_too(process: PipeProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(process.pid)
    assert failure_of(process, "hello").outcome == "killed"


def test_a_call_returns_when_another_thread_kills_its_process(process: PipeProcess) -> None:
    threading.Timer(SHORT_S, process.kill).start()
    assert failure_of(process, "spin").outcome == "killed"
    process.kill()


@pytest.mark.parametrize("process", ["spawned", "forked"], indirect=True)
def test_shutdown_signals_are_left_to_the_learner(process: PipeProcess) -> None:
    for number in SHUTDOWN_SIGNALS:
        os.kill(process.pid, number)
    assert process.ask("hello", TEXT, DEADLINE_S, "") == "hello" and process.is_usable


def test_output_of_a_process_is_not_part_of_its_answers(
    process: PipeProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    assert process.ask("print", TEXT, DEADLINE_S, "") == "print"
    assert capfd.readouterr().out == ""


LEARNER = """
import os, time
from multiprocessing import forkserver
from protocol.signals import SHUTDOWN_SIGNALS
from tests.learner.sandbox.service import DEADLINE_S, TEXT, service
if __name__ == "__main__":
    process = service("{way}")
    for number in SHUTDOWN_SIGNALS if "{way}" == "forked" else ():
        os.kill(forkserver._forkserver._forkserver_pid, number)
    time.sleep(0.2)
    print(*(process.ask(command, TEXT, DEADLINE_S, "") for command in {commands}), process.pid, flush=True)
    process.ask("spin", TEXT, 600.0, "")
"""
"""The fork server must ignore shutdown signals: without it, the learner would consider all of its processes dead."""


@contextmanager
def learner(directory: Path, way: str, *commands: str) -> Iterator[list[str]]:
    """Run a script outside its working directory, as `learner` is, and kill it in the end.

    Yields the answers of its process to the commands, and the id of that process.
    """
    (directory / "learner_of_test.py").write_text(LEARNER.format(way=way, commands=commands))
    (directory / "run").mkdir()
    (directory / "run" / "protocol.py").write_text("raise SystemExit('the user\\'s own')")
    with subprocess.Popen(
        [sys.executable, str(directory / "learner_of_test.py")], stdout=subprocess.PIPE, text=True,
        cwd=directory / "run", env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()
        finally:
            process.kill()


@pytest.mark.parametrize("way", ["spawned", "forked"])
def test_a_process_and_its_descendants_end_with_the_learner_in_the_middle_of_a_call(tmp_path: Path, way: str) -> None:
    with learner(tmp_path, way, "start") as pids:
        assert len(pids) == 2 and all(psutil.pid_exists(int(pid)) for pid in pids)
    wait_until_gone(*map(int, pids))


def test_a_forked_process_has_preloaded_modules_and_ignores_the_working_directory(tmp_path: Path) -> None:
    with learner(tmp_path, "forked", "preloaded", "environ") as (was_preloaded, safe_path, pid):
        assert (was_preloaded, safe_path) == ("True", "None"), "the environment of the user must be unchanged"
    wait_until_gone(int(pid))
