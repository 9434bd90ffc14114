"""One of several servers is killed, stopped or hangs in the midst of a sync: the others have the version soon,
without it."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.servers.fleet import Fleet
from learner.servers.weight_sync import WeightSync
from tests.learner.servers.fleets import a_fleet
from tests.peer import Peer
from tests.ports import free_port
from tests.push_peers import NUM_TENSORS, ScriptedWeights, digest, run_server
from tests.push_traps import HANG, Trap
from tests.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.system

NUM_SERVERS = 4
STRUCK = 1
"""In the middle of the chain: the one before it waits to hand on, and those after it for bytes."""
PATIENCE_S, HANG_S = 2.5, 10.0
BUSY_MACHINE_S = 8.0
"""What the rest of a sync may take beside the patience and a second, on a machine that has other work."""
TENSOR_BYTES = {"none": 8 << 20, "delta": 1 << 20}
"""Of the six tensors. Without compression, more than memory and kernels of the chain keep."""
MID_TRANSFER = 3
"""Of the broadcasts of a sync, each of a tensor or a checksum."""


def weights(compression: str, version: int) -> list[tuple[str, torch.Tensor]]:
    """Every tensor begins with its version, by which a server knows torn weights."""
    steps_N = torch.arange(TENSOR_BYTES[compression] // 4, dtype=torch.float32)
    return [(f"layer.{i}", steps_N * (i + 1) + version) for i in range(NUM_TENSORS)]


@contextmanager
def syncing(tmp_path: Path, compression: str) -> Iterator[tuple[WeightSync, ScriptedWeights, Fleet, list[Peer]]]:
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(NUM_SERVERS)]
    with ExitStack() as cleanup:
        servers = []
        for number, endpoint in enumerate(endpoints):
            servers.append(Peer(run_server, tmp_path / f"server-{number}.log", endpoint, False))
            cleanup.callback(servers[-1].kill)
        settings: dict[str, Any] = {
            "straggler_timeout_s": PATIENCE_S,
            "timeout_s": 60.0,
            "bucket_mib": 8,
            "compression": compression,
        }
        fleet = cleanup.enter_context(a_fleet(tmp_path, *endpoints, connect_timeout_s=TIMEOUT_S, weight_sync=settings))
        until(lambda: len(fleet.connected()) == NUM_SERVERS)
        scripted = ScriptedWeights(partial(weights, compression))
        sync = WeightSync(fleet, scripted, fleet._run.learner.weight_sync)
        cleanup.callback(sync.close)
        assert sync.send(0) is not None
        yield sync, scripted, fleet, servers


@pytest.mark.parametrize("compression", ["none", "delta"])
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP, HANG], ids=["killed", "stopped", "hangs"])
def test_the_others_go_on_without_a_server_that_fails_in_mid_sync(
    tmp_path: Path, signal_number: int, compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    with syncing(tmp_path, compression) as (sync, scripted, fleet, servers):
        struck, others = fleet.members[STRUCK], [one for one in fleet.members if one is not fleet.members[STRUCK]]
        scripted.version = 1
        servers[STRUCK].send(Trap("broadcast", servers[STRUCK].pid, signal_number, MID_TRANSFER, HANG_S))
        started = time.monotonic()
        report = sync.send(1)
        took_s = time.monotonic() - started
        assert report is not None and sync.holders(1) == others
        assert took_s < PATIENCE_S + 1 + BUSY_MACHINE_S
        failed = [line for line in caplog.messages if "of version 1 to" in line and "failed while" in line]
        assert len(failed) == 1 and struck.endpoint in failed[0], failed
        for index, server in enumerate(servers):
            if index != STRUCK:
                status = server.ask("status")
                assert (status["policy_version"], status["digest"]) == (1, digest(weights(compression, 1)))
                assert status["torn"] == 0
        if signal_number == signal.SIGKILL:
            return
        if signal_number == signal.SIGSTOP:
            servers[STRUCK].go_on()
        until(lambda: struck in fleet.connected())
        until(lambda: sync.send(1, [struck]) is not None, "it has ended what was given up")
        scripted.version = 2
        together = sync.send(2)
        assert together is not None and sync.holders(2) == list(fleet.members)
        assert {server.ask("status")["digest"] for server in servers} == {digest(weights(compression, 2))}
