"""Processes that tests wait for."""

import time

import psutil

TIMEOUT_S = 60.0


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"of {pids}, some outlive what has started them"
        time.sleep(0.02)
