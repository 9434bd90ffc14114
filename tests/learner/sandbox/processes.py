"""Wait for processes to end."""

import psutil

from tests.waiting import until


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(*pids: int) -> None:
    until(lambda: all(map(is_gone, pids)), f"some of {pids} outlive their parent")
