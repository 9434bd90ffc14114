"""Replicas of an engine (server.data_parallel_size), and processes that end with their server.

    VersionedLLM ─ starts ─▶ a coordinator, which counts what waits at each replica, for vLLM's routing (`coordinate`)
                         └▶ EngineCore_DP0, EngineCore_DP1, …: each on cores of its own (`run_replica`)
    every process of vLLM's watches the server and ends with it (`end_with_server`)

vLLM starts all replicas on the cores of their parent, where their threads would spin against each other, and its processes outlive
a server that was killed. The functions that they run are exchanged for ours while an engine starts. A replica of a dense model
knows nothing of the others.
"""

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc

log = logging.getLogger(__name__)

SERVER_PID = "SLIPSTREAM_SERVER_PID"
"""In the environment of every process the server starts."""
COORDINATOR = "VLLM_DP_Coordinator"
"""The name of its process."""
RUN_COORDINATOR = DPCoordinatorProc.run_coordinator
"""vLLM's own, before `replicas_as_ours` puts `coordinate` into its place."""
RUN_ENGINE = EngineCoreProc.run_engine_core
"""vLLM's own; taken as this is imported, for a process that was forked finds the exchanged one in its class."""
STICKY_MARGIN = 2
"""So many more requests than the freest replica may the one have that a turn goes to for its keys and values."""
REPLICA = " replica "
"""In a salt, before the number of the replica that has what was computed under it."""


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


def replica_of_turn(salt: str, nums_in_flight: Sequence[int]) -> int:
    """Where a turn of an episode goes: to the replica that its salt names, unless that has much more to do than the freest."""
    freest = min(range(len(nums_in_flight)), key=nums_in_flight.__getitem__)
    named = salt.rpartition(REPLICA)[2]
    replica = int(named) if named.isdecimal() else freest
    has_room = replica < len(nums_in_flight) and nums_in_flight[replica] <= nums_in_flight[freest] + STICKY_MARGIN
    return replica if has_room else freest


def salt_at(salt: str, replica: int) -> str:
    """The same salt, naming this replica. What it names otherwise is not there."""
    return f"{salt.partition(REPLICA)[0]}{REPLICA}{replica}"


@contextmanager
def replicas_as_ours(num_replicas: int, *, divide_cores: bool) -> Iterator[None]:
    """Meanwhile the coordinator that vLLM starts ends with the server, and its replicas divide the cores of this thread."""
    if num_replicas == 1:
        yield
        return
    num_cores = len(os.sched_getaffinity(0))
    if divide_cores:
        if num_cores < num_replicas:
            log.warning("server.cpu_cores gives %d core(s) to %d replicas, which share them", num_cores, num_replicas)
        # Before they begin: libgomp reads it once, while torch is imported.
        os.environ["OMP_NUM_THREADS"] = str(max(1, num_cores // num_replicas))
    EngineCoreProc.run_engine_core = staticmethod(partial(run_replica, num_replicas if divide_cores else None))
    DPCoordinatorProc.run_coordinator = staticmethod(coordinate)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(RUN_ENGINE)
        DPCoordinatorProc.run_coordinator = staticmethod(RUN_COORDINATOR)


def run_replica(num_dividing: int | None, *args: Any, dp_rank: int = 0, **kwargs: Any) -> None:
    """What the process of one replica does. So many divide the cores that it finds; None: it keeps them."""
    forget_handlers()
    if num_dividing is not None:
        os.sched_setaffinity(0, cores_of(dp_rank, sorted(os.sched_getaffinity(0)), num_dividing))
    RUN_ENGINE(*args, dp_rank=dp_rank, **kwargs)


def cores_of(replica: int, cores: Sequence[int], num_replicas: int) -> set[int]:
    """As many for each, neighbours together; what is left over nobody gets. Too few are used in turns."""
    each = len(cores) // num_replicas
    return set(cores[replica * each : (replica + 1) * each]) if each else {cores[replica % len(cores)]}
