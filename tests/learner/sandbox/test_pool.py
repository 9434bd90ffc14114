"""Processes in a pool: leased by one caller at a time, replaced when ended or unanswered, and gone after close."""

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from learner.sandbox.descendants import ProcessEntry, all_processes
from learner.sandbox.pool import PoolClosed, ProcessPool
from learner.sandbox.process import PipeProcess, ProcessFailure
from protocol.errors import ProcessesExhausted
from tests.learner.sandbox.processes import wait_until_gone
from tests.learner.sandbox.service import DEADLINE_S, TEXT, UNWATCHED, WAYS, service
from tests.waiting import until

EXHAUSTED = r"cannot start another process of learner.test \(.*\); lower learner.test.num_tests, or raise its limits"
FORK_SERVER_WITHOUT_ROOM = """
from learner.sandbox.pool import ProcessPool
from learner.sandbox.process import PipeProcess
from learner.sandbox.start import fork
from protocol.errors import ProcessesExhausted
from tests.learner.sandbox.service import LIMITS, serve

def start():
    return PipeProcess(*fork("service", "no_room", serve), LIMITS)

try:
    ProcessPool(start, LIMITS).start()
except ProcessesExhausted as error:
    print(error)
"""
NO_ROOM = """
import errno, os

def fork():
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = fork
"""


@pytest.fixture
def pool() -> Iterator[ProcessPool[PipeProcess]]:
    pool = ProcessPool(service, UNWATCHED, max_leases=2)
    yield pool
    pool.close()


def test_a_released_process_is_reused(pool: ProcessPool[PipeProcess]) -> None:
    first = pool.acquire()
    second = pool.acquire()
    assert first is not second
    pool.release(first)
    assert pool.acquire() is first


def test_a_process_that_ended_or_has_a_pending_answer_is_replaced(pool: ProcessPool[PipeProcess]) -> None:
    unanswered = pool.acquire()
    unanswered.has_pending_answer = True
    pool.release(unanswered)
    wait_until_gone(unanswered.pid)
    idle = pool.acquire()
    assert idle is not unanswered and idle.ask("hello", TEXT, DEADLINE_S, "") == "hello"
    pool.release(idle)
    os.kill(idle.pid, signal.SIGKILL)
    until(lambda: not idle.is_usable)  # the fork server reports the end of a process with a delay
    assert pool.acquire() is not idle


def test_concurrent_leases_reach_the_limit(pool: ProcessPool[PipeProcess]) -> None:
    pids: list[int] = []
    most = now = 0

    async def lease() -> None:
        nonlocal most, now
        async with pool.lease() as process:
            most, now = max(most, now + 1), now + 1
            pids.append(process.pid)
            await asyncio.sleep(0.02)
            now -= 1

    async def all_at_once() -> None:
        await asyncio.gather(*(lease() for _ in range(5)))

    asyncio.run(all_at_once())
    assert most == 2 and len(pids) == 5 and len(set(pids)) == 2


def test_close_kills_all_processes_and_ends_pending_calls(pool: ProcessPool[PipeProcess]) -> None:
    busy, idle = pool.acquire(), pool.acquire()
    pool.release(idle)
    threading.Timer(0.2, pool.close).start()
    assert isinstance(busy.ask("spin", TEXT, DEADLINE_S, ""), ProcessFailure)
    wait_until_gone(busy.pid, idle.pid)
    with pytest.raises(PoolClosed):
        pool.acquire()

    async def lease() -> None:
        async with pool.lease():
            raise AssertionError("leased a process from a closed pool")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(lease())


def test_close_looks_through_the_machine_once_for_all_processes(
    pool: ProcessPool[PipeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []

    def look() -> dict[int, ProcessEntry]:
        looks.append(None)
        return all_processes()

    processes = [pool.acquire() for _ in range(3)]
    monkeypatch.setattr("learner.sandbox.descendants.all_processes", look)
    pool.close()
    assert len(looks) == 1
    wait_until_gone(*(process.pid for process in processes))


def test_a_process_that_starts_while_the_pool_closes_does_not_outlive_it() -> None:
    started: list[PipeProcess] = []

    def start_and_close() -> PipeProcess:
        started.append(service())
        pool.close()
        return started[0]

    pool = ProcessPool(start_and_close, UNWATCHED)
    with pytest.raises(PoolClosed):
        pool.acquire()
    wait_until_gone(started[0].pid)


@pytest.mark.parametrize("way", WAYS)
def test_a_machine_without_room_for_a_process_is_an_error_with_the_key(way: str) -> None:
    pool = ProcessPool(partial(service, way), UNWATCHED)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(ProcessesExhausted, match=EXHAUSTED):
            pool.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_fork_server_that_cannot_fork_is_an_error_with_the_key(tmp_path: Path) -> None:
    (tmp_path / "no_room.py").write_text(NO_ROOM)
    done = subprocess.run(
        [sys.executable, "-c", FORK_SERVER_WITHOUT_ROOM],
        env=os.environ | {"PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert re.search(EXHAUSTED, done.stdout), done.stderr
    assert "Resource temporarily unavailable" in done.stderr
