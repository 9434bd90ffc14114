"""Signals as users send them, to a process group of a test's own: who acts on them, and who goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from protocol.signals import SHUTDOWN_SIGNALS, Interrupt, shutdown_signals, signals_blocked

TIMEOUT_S = 60.0
GROUP = """
import multiprocessing, os, signal, subprocess, sys, time
from protocol.signals import signals_blocked, ignore_shutdown_signals, shutdown_signals

def held(pipe):
    pipe.send(os.getpid())
    time.sleep(1000)

def left(pipe):
    ignore_shutdown_signals()
    theirs = subprocess.Popen(["sleep", "1000"])
    pipe.send((os.getpid(), theirs.pid))
    theirs.wait()
    pipe.send(theirs.returncode)
    time.sleep(1000)

def main():
    heard = []
    for number in shutdown_signals():
        signal.signal(number, lambda number, frame: heard.append(number))
    context = multiprocessing.get_context(sys.argv[1])
    pipe, theirs = context.Pipe()
    processes = [context.Process(target=target, args=(theirs,), daemon=True) for target in (held, left)]
    for process in processes:
        with signals_blocked():
            process.start()
        print(pipe.recv(), flush=True)
    while not heard:
        time.sleep(0.01)
    print("heard", *heard, "; the user's own ended with", pipe.recv(), flush=True)
    print("alive", *[process.is_alive() for process in processes], flush=True)
    for process in processes:
        process.kill()
        process.join()

if __name__ == "__main__":
    main()
"""


@contextmanager
def group_of(
    script: str, *arguments: str, directory: Path, under: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Run a script as the leader of a process group."""
    path = directory / "group.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*under, sys.executable, str(path), *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("number", SHUTDOWN_SIGNALS)
def test_a_signal_to_the_group_is_heard_by_its_first_process_and_the_others_go_on(
    method: str, number: signal.Signals, tmp_path: Path
) -> None:
    with group_of(GROUP, method, directory=tmp_path) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().strip()
        os.killpg(process.pid, number)
        assert process.stdout.readline() == f"heard {number} ; the user's own ended with {-number}\n"
        assert process.stdout.readline() == "alive True True\n"
        assert process.wait(TIMEOUT_S) == 0


def test_this_process_itself_hears_signals_while_it_starts_others_in_a_thread_and_afterwards() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with signals_blocked():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) >= set(SHUTDOWN_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


NOHUP = """
import asyncio, sys
from inference_server.shutdown import until_ended
from protocol.signals import Interrupt

async def part():
    print("ready", flush=True)
    await asyncio.Event().wait()

async def drain():
    print("drains", flush=True)

with Interrupt() as interrupt:
    asyncio.run(until_ended([part()], drain))
    print("interrupted", interrupt.requested, flush=True)
"""


def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path: Path) -> None:
    with group_of(NOHUP, directory=tmp_path, under=("nohup",)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGHUP)
        time.sleep(0.2)  # for a signal that would be taken
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "drains\n"
        assert process.wait(TIMEOUT_S) == 0


def test_signals_to_end_are_all_unless_hangups_are_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert shutdown_signals() == SHUTDOWN_SIGNALS
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert shutdown_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_stops_a_learner_after_its_step_however_often_it_says_so() -> None:
    with Interrupt() as interrupt:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_process_that_keeps_count_of_shared_memory_outlives_a_closed_terminal(tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
from multiprocessing import resource_tracker
from protocol.signals import signals_blocked
told = []
signal.signal(signal.SIGHUP, lambda *_: told.append(True))
with signals_blocked():
    pass
tracker = resource_tracker._resource_tracker._pid
print(tracker, flush=True)
sys.stdin = open("/dev/null")
while not told:
    time.sleep(0.01)
print(os.waitpid(tracker, os.WNOHANG), flush=True)
"""
    with group_of(script, directory=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline().strip().isdecimal()
        os.killpg(process.pid, signal.SIGHUP)
        assert process.stdout.readline() == "(0, 0)\n"
        assert process.wait(TIMEOUT_S) == 0
