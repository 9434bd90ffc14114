"""Processes that vLLM starts, and that would outlive a server that was killed: each of them watches it and ends with it.

the server ─ starts ─▶ EngineCore, workers (worker.py calls end_with_server)
                    └▶ the coordinator of several replicas (coordinate, in place of vLLM's own function)
"""

import contextlib
import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc

SERVER_PID = "SLIPSTREAM_SERVER_PID"
"""In the environment of every process the server starts."""
COORDINATOR = "VLLM_DP_Coordinator"
"""The name of its process."""
RUN_COORDINATOR = DPCoordinatorProc.run_coordinator
"""vLLM's own, before replicas.py puts `coordinate` into its place."""


def end_with_server() -> None:
    """Kill this process and its engine when the server is gone: vLLM's own processes outlive a SIGKILL of it for ever."""
    threading.Thread(target=_wait_and_kill, args=(int(os.environ[SERVER_PID]),), daemon=True).start()


def coordinate(*args: Any, **kwargs: Any) -> None:
    """What the coordinator's process does."""
    forget_handlers()
    end_with_server()
    RUN_COORDINATOR(*args, **kwargs)


def forget_handlers() -> None:
    """In a process that may have been forked from the server, whose loop would take a signal to this process for one to itself."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait_and_kill(server_pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(server_pid)], [], [])
    engine_pid = os.getppid()  # of a worker with a process of its own; else the server, or who inherited us from it
    if engine_pid not in (1, server_pid) and "EngineCore" in Path(f"/proc/{engine_pid}/cmdline").read_text():
        os.kill(engine_pid, signal.SIGKILL)
    os._exit(1)
