"""Replicas of an engine (server.data_parallel_size).

    VersionedLLM ─ starts ─▶ the coordinator, which counts the waiting requests of each replica (`coordinate`)
                         └▶ EngineCore_DP0, EngineCore_DP1, …: each on its own cores (`run_replica`)

vLLM starts all replicas on the cores of their parent, where their threads would spin against each other. Its
processes also outlive a killed server. While an engine starts, this module replaces the functions that these
processes run. Replicas of a dense model are independent of each other.
"""

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc

from inference_server.engine.processes import end_with_server

log = logging.getLogger(__name__)

COORDINATOR = "VLLM_DP_Coordinator"
"""Name of the coordinator's process."""
RUN_COORDINATOR = DPCoordinatorProc.run_coordinator
"""vLLM's function, saved before `replicas_as_ours` replaces it with `coordinate`."""
RUN_ENGINE = EngineCoreProc.run_engine_core
"""vLLM's function, saved on import, because a forked process finds the replacement in its class."""
STICKY_MARGIN = 2
"""Number of requests by which the replica with a turn's KV cache may exceed the least loaded replica."""
REPLICA = " replica "
"""Separator in a salt, before the number of the replica that holds the KV cache."""


def coordinate(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's coordinator, which exits with the server."""
    forget_handlers()
    end_with_server()
    RUN_COORDINATOR(*args, **kwargs)


def forget_handlers() -> None:
    """Reset the signal handlers of a process that may be a fork of the server.

    Otherwise the server's event loop would treat a signal to this process as its own.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def replica_of_turn(salt: str, nums_in_flight: Sequence[int]) -> int:
    """Return the replica for a turn of an episode.

    The salt names it, unless that replica is much busier than the least loaded one.
    """
    freest = min(range(len(nums_in_flight)), key=nums_in_flight.__getitem__)
    named = salt.rpartition(REPLICA)[2]
    replica = int(named) if named.isdecimal() else freest
    has_room = replica < len(nums_in_flight) and nums_in_flight[replica] <= nums_in_flight[freest] + STICKY_MARGIN
    return replica if has_room else freest


def salt_at(salt: str, replica: int) -> str:
    """Return the salt with the number of this replica.

    A number in the given salt is dropped: that replica's KV cache is not available here.
    """
    return f"{salt.partition(REPLICA)[0]}{REPLICA}{replica}"


@contextmanager
def replicas_as_ours(num_replicas: int, *, divide_cores: bool) -> Iterator[None]:
    """Replace vLLM's entry points of the coordinator and the replicas in this context.

    The coordinator then exits with the server. With `divide_cores`, replicas divide this thread's cores.
    """
    if num_replicas == 1:
        yield
        return
    num_cores = len(os.sched_getaffinity(0))
    if divide_cores:
        if num_cores < num_replicas:
            log.warning("server.cpu_cores gives %d core(s) to %d replicas, which share them", num_cores, num_replicas)
        # Set before the replicas start: libgomp reads it once, while torch is imported.
        os.environ["OMP_NUM_THREADS"] = str(max(1, num_cores // num_replicas))
    EngineCoreProc.run_engine_core = staticmethod(partial(run_replica, num_replicas if divide_cores else None))
    DPCoordinatorProc.run_coordinator = staticmethod(coordinate)
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = staticmethod(RUN_ENGINE)
        DPCoordinatorProc.run_coordinator = staticmethod(RUN_COORDINATOR)


def run_replica(num_dividing: int | None, *args: Any, dp_rank: int = 0, **kwargs: Any) -> None:
    """Run the engine of one replica.

    `num_dividing` replicas divide the available cores. None: this replica uses all of them.
    """
    forget_handlers()
    if num_dividing is not None:
        os.sched_setaffinity(0, cores_of(dp_rank, sorted(os.sched_getaffinity(0)), num_dividing))
    RUN_ENGINE(*args, dp_rank=dp_rank, **kwargs)


def cores_of(replica: int, cores: Sequence[int], num_replicas: int) -> set[int]:
    """Return an equal number of adjacent cores for each replica.

    Remaining cores stay unused. If there are fewer cores than replicas, replicas share cores.
    """
    each = len(cores) // num_replicas
    return set(cores[replica * each : (replica + 1) * each]) if each else {cores[replica % len(cores)]}
