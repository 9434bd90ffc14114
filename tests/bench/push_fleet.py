"""Measure pushes to 1, 2, 4 … servers over loopback: the cost of each further server, and how long each stops.

    WeightSync (reads the weights once) ═▶ one collective per server ═▶ real server code, an engine that loads in place

With more servers than cores, the result measures the machine.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from learner.config import LearnerRun, WeightSyncConfig
from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from learner.servers.weight_sync import Round, WeightSync
from learner.servers.weight_transfer import SyncReport
from protocol.messages import PROTOCOL_VERSION, Hello
from tests.fingerprint import MODEL
from tests.ports import free_port
from tests.push_peers import ScriptedWeights, run_server

TENSOR_MIB = 4
CONNECT_TIMEOUT_S = 60.0


class ReportingSync(WeightSync):
    """Weight sync that keeps the reports of its last sync, by server."""

    reports: Mapping[Member, SyncReport] = {}

    def _summary(self, version: int, outcome: Round) -> SyncReport:
        self.reports = outcome.reports
        return super()._summary(version, outcome)


def measure(num_servers: int, size_mib: int, num_pushes: int) -> dict[str, Any]:
    """Return medians over pushes of `size_mib`, without the first push, which forms the collectives."""
    tensors = [(f"layer.{i}", torch.rand(TENSOR_MIB << 18)) for i in range(max(1, size_mib // TENSOR_MIB))]
    with processes(num_servers) as endpoints, fleet_on(endpoints) as fleet:
        pusher = ReportingSync(fleet, ScriptedWeights(lambda version: tensors), WeightSyncConfig(bucket_mib=64))
        seconds: list[float] = []
        stalls: dict[str, list[float]] = {endpoint: [] for endpoint in endpoints}
        for version in range(1 + num_pushes):
            report = pusher.send(version)
            assert report is not None and len(pusher.reports) == num_servers
            if version:
                seconds.append(report.total_s)
                for member, one in pusher.reports.items():
                    stalls[member.endpoint].append(one.stall_s)
        pusher.close()
    return {
        "seconds": statistics.median(seconds),
        "stall_seconds": [statistics.median(of_server) for of_server in stalls.values()],
        "gib_per_s_in_all": num_servers * size_mib / 1024 / statistics.median(seconds),
    }


@contextmanager
def processes(num_servers: int) -> Iterator[list[str]]:
    """Yield listening servers, which end with the block."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as cleanup:
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-bench-")))
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(num_servers)]
        pipes = []
        for number, endpoint in enumerate(endpoints):
            pipe, theirs = context.Pipe()
            log = directory / f"{number}.log"
            process = context.Process(target=run_server, args=(theirs, log, endpoint, False), daemon=True)
            process.start()
            theirs.close()
            cleanup.callback(process.join, CONNECT_TIMEOUT_S)
            cleanup.callback(process.kill)
            pipes.append(pipe)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        yield endpoints


@contextmanager
def fleet_on(endpoints: list[str]) -> Iterator[Fleet]:
    """Yield a fleet with all servers connected."""
    learner = {"steps": 1, "data": {"task": "reverse"}, "reward": {"functions": ["exact_match"]}}
    shared = {"model": "scripted", "run_dir": "unused", "endpoints": endpoints, "dtype": "float32", "learner": learner}
    hello = Hello(run="bench", protocol_version=PROTOCOL_VERSION, model=MODEL, learner="bench")
    fleet = Fleet(msgspec.convert(shared, LearnerRun), hello, LoopThread("bench"))
    fleet.start(lambda member, group: None)
    try:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while len(fleet.connected()) < len(endpoints):
            assert time.monotonic() < deadline, "not all servers answered"
            time.sleep(0.05)
        yield fleet
    finally:
        fleet.loop.stop()
        fleet.close()


def run(most: int, size_mib: int, num_pushes: int) -> dict[str, Any]:
    """Return results by number of servers: 1, 2, 4 … up to `most`."""
    counts = [2**power for power in range(most.bit_length()) if 2**power <= most]
    by_servers = {str(num_servers): measure(num_servers, size_mib, num_pushes) for num_servers in counts}
    return {"size_mib": size_mib, "by_servers": by_servers}
