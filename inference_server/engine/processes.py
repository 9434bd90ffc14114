"""Processes of an engine: they exit with their server, which watches and kills its workers.

vLLM's own processes would outlive a killed server forever. When one of several workers is killed, vLLM itself
reports it only after 9 s, because it waits for the others.
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from inference_server.engine.interface import EngineDead

SERVER_PID = "SLIPSTREAM_SERVER_PID"
"""Environment variable, set in every process that the server starts."""
NODE_WORKERS = "SLIPSTREAM_NODE_WORKERS"
"""Environment variable with the number of the server's workers on this node."""
END_TIMEOUT_S = 10.0
"""Maximum seconds for a killed process to release its memory, including GPU memory."""


def end_with_server() -> None:
    """Kill this process and its engine when the server is gone."""
    threading.Thread(target=_wait_and_kill, args=(int(os.environ[SERVER_PID]),), daemon=True).start()


class EngineProcesses:
    """Worker processes, held by pidfd, because a pid may be reused."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = {os.pidfd_open(pid) for pid in set(pids)}

    @property
    def one_has_ended(self) -> bool:
        return any(_has_ended(descriptor, 0) for descriptor in self._descriptors)

    def kill(self) -> None:
        """Kill the remaining processes. Raises EngineDead if one outlives END_TIMEOUT_S."""
        for descriptor in self._descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        while self._descriptors:
            descriptor = self._descriptors.pop()
            ended = _has_ended(descriptor, END_TIMEOUT_S)
            os.close(descriptor)
            if not ended:
                raise EngineDead(f"a worker of the dead engine is still running {END_TIMEOUT_S:g} s after SIGKILL")


def _has_ended(descriptor: int, timeout_s: float) -> bool:
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(timeout_s * 1000))


def _wait_and_kill(server_pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(server_pid)], [], [])
    # The engine, if this worker has its own process. Otherwise the server, or a new parent.
    engine_pid = os.getppid()
    if engine_pid not in (1, server_pid) and "EngineCore" in Path(f"/proc/{engine_pid}/cmdline").read_text():
        os.kill(engine_pid, signal.SIGKILL)
    os._exit(1)
