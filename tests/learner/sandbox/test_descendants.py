"""All descendants of a process end with it: in its group, in other sessions, and orphans."""

import os
import signal
import subprocess
import sys
from collections.abc import ItemsView, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from learner.sandbox.descendants import (
    ProcessEntry,
    all_processes,
    children_by_parent,
    descendants_of,
    kill_with_descendants,
)
from learner.sandbox.pool import resident_bytes
from tests.learner.sandbox.processes import wait_until_gone
from tests.waiting import until

ROOT = Path(__file__).parents[3]
STARTS = """
import os, subprocess, sys, time
from learner.sandbox.descendants import adopt_orphans, end_with_descendants
adopt_orphans()
leave = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", leave])
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
if "ends" in sys.argv:
    sys.stdin.read()
    end_with_descendants()
while True:
    time.sleep(1)
"""
"""Starts an orphan, a child in the group, and a child in another session."""


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(3)]
        try:
            yield process, pids
        finally:
            for pid in [process.pid, *pids]:
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)


def test_all_descendants_count_towards_the_memory_of_a_process_and_are_killed_with_it() -> None:
    with started() as (process, pids):
        single = [psutil.Process(pid) for pid in (process.pid, *pids)]

        def is_their_sum() -> bool:
            alone = [one.memory_info().rss for one in single]
            total = resident_bytes([process.pid], all_processes())[process.pid]
            return total == pytest.approx(sum(alone), rel=0.2) and total > alone[0] + alone[1]

        until(is_their_sum)  # they may still start
        assert descendants_of(process.pid, children_by_parent(all_processes())) == set(pids)
        kill_with_descendants(process.pid)
        wait_until_gone(process.pid, *pids)


def test_the_memory_of_many_processes_is_counted_in_one_pass() -> None:
    class Seen(dict[int, ProcessEntry]):
        num_passes = 0

        def items(self) -> ItemsView[int, ProcessEntry]:
            self.num_passes += 1
            return super().items()

    seen = Seen({pid: ProcessEntry(parent=pid // 2, group=1, resident_bytes=pid) for pid in range(2, 8)})
    assert resident_bytes([2, 3, 7, 9], seen) == {2: 2 + 4 + 5, 3: 3 + 6 + 7, 7: 7, 9: 0}
    assert seen.num_passes == 1


def test_a_process_can_end_together_with_its_descendants() -> None:
    with started("ends") as (process, pids):
        assert process.stdin is not None
        process.stdin.close()
        wait_until_gone(process.pid, *pids)


def test_a_dead_process_has_no_descendants() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert descendants_of(process.pid, children_by_parent(all_processes())) == set()
    assert resident_bytes([process.pid], all_processes()) == {process.pid: 0}
    kill_with_descendants(process.pid)
