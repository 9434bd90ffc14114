"""Processes that several threads start and poll."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from learner.sandbox.start import Child, ForkedChild, ScriptChild, run_script, spawn

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


def send_names(pipe: Connection) -> None:
    pipe.send(list(os.environ))


def start_script(directory: Path) -> tuple[Connection, Child]:
    script = directory / "script.py"
    script.write_text(
        "import os, sys\nfrom multiprocessing.connection import Connection\n"
        "Connection(int(sys.argv[1])).send(list(os.environ))\n"
    )
    return run_script(sys.executable, script)


@pytest.mark.parametrize("start", [lambda _: spawn("names", send_names), start_script])
def test_user_code_is_no_rank_of_the_learner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: Callable[[Path], tuple[Connection, Child]]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OF_THE_USER"):
        monkeypatch.setenv(name, "1")
    pipe, child = start(tmp_path)
    with pipe:
        assert pipe.poll(TIMEOUT_S)
        names = pipe.recv()
    child.join(TIMEOUT_S)
    if isinstance(child, ScriptChild) and child.lifeline is not None:
        child.lifeline.close()
    assert "OF_THE_USER" in names
    assert not {name for name in names if "RANK" in name or "WORLD" in name or "MASTER" in name or "ELASTIC" in name}
