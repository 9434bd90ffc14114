"""Signals to a process group, as users send them: which processes react and which continue."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from inference_server.shutdown import until_ended
from protocol.signals import SHUTDOWN_SIGNALS, Interrupt, shutdown_signals, signals_blocked

TIMEOUT_S = 60.0
GROUP = """
import multiprocessing, os, signal, subprocess, sys, time
from multiprocessing import resource_tracker
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
    tracker = resource_tracker._resource_tracker._pid  # counts shared memory
    while not heard:
        time.sleep(0.01)
    print("heard", *heard, "; the user's own ended with", pipe.recv(), flush=True)
    print("alive", *[process.is_alive() for process in processes], os.waitpid(tracker, os.WNOHANG), flush=True)
    for process in processes:
        process.kill()
        process.join()

if __name__ == "__main__":
    main()
"""


@contextmanager
def group_of(script: str, *arguments: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a script as the leader of a process group."""
    path = directory / "group.py"
    path.write_text(script)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(path), *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("method", "number"), [("fork", signal.SIGINT), ("spawn", signal.SIGTERM), ("forkserver", signal.SIGHUP)]
)
def test_only_the_first_process_reacts_to_a_signal_to_the_group(
    method: str, number: signal.Signals, tmp_path: Path
) -> None:
    with group_of(GROUP, method, directory=tmp_path) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline().strip()
        os.killpg(process.pid, number)
        assert process.stdout.readline() == f"heard {number} ; the user's own ended with {-number}\n"
        assert process.stdout.readline() == "alive True True (0, 0)\n"
        assert process.wait(TIMEOUT_S) == 0


def test_the_process_reacts_to_signals_during_and_after_starts_in_a_thread() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with signals_blocked():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) >= set(SHUTDOWN_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.fixture
def under_nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("under_nohup")
def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    async def part() -> None:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0)
        told.append("part")
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

    async def drain() -> None:
        told.append("drain")

    told: list[str] = []
    assert shutdown_signals() == (signal.SIGINT, signal.SIGTERM)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        assert not interrupt.requested
        asyncio.run(until_ended([part()], drain))
    assert told == ["part", "drain"]


def test_the_first_signal_here_stops_nothing_at_once_if_another_process_has_had_one() -> None:
    with Interrupt() as interrupt:
        interrupt.is_elsewhere = True
        assert interrupt.requested
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_sigterm_that_a_parent_forwards_to_a_learner_that_has_got_the_signal_too_is_no_second_one(
    first: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Interrupt() as interrupt:
        for number in (first, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert interrupt.requested
        monkeypatch.setattr("protocol.signals.FORWARDED_WITHIN_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_repeated_sighups_of_a_terminal_stop_a_learner_after_its_step() -> None:
    with Interrupt() as interrupt:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
