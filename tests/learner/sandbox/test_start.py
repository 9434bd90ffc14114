"""Processes that several threads start and poll."""

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, forkserver

import pytest

from learner.sandbox.start import ForkedChild

CONTEXT = multiprocessing.get_context("forkserver")
LOOK_S, TIMEOUT_S = 0.05, 60.0


def ending_with(code: int) -> ForkedChild:
    return ForkedChild(CONTEXT.Process(target=os._exit, args=(code,)))


def test_threads_that_poll_a_dead_process_concurrently_get_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = forkserver.read_signed

    def read_slowly(fd: int) -> int:
        time.sleep(LOOK_S)  # so that other threads poll meanwhile
        return read(fd)

    monkeypatch.setattr(forkserver, "read_signed", read_slowly)
    ended = ending_with(3)
    ended.join(TIMEOUT_S)
    assert ended.exitcode == 3
    seen = ending_with(4)
    connection.wait([seen.sentinel], TIMEOUT_S)
    with ThreadPoolExecutor(4) as threads:
        looks = [threads.submit(lambda: seen.exitcode) for _ in range(3)]
        started = threads.submit(ending_with, 0)
        assert [look.result() for look in looks] == [4, 4, 4]
    assert seen.exitcode == 4
    started.result().join(TIMEOUT_S)
