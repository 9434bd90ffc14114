"""Sessions that end before they were formed, or while they are received: nobody waits for them and nothing of them
stays."""

import time
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest
import torch

from inference_server.engine.interface import PushOrder
from inference_server.engine.weight_receiver import Receiver
from learner.config import WeightSyncConfig
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from learner.servers.sync_session import SyncSession, SyncSessions
from protocol.errors import ConfigError, PushError
from protocol.messages import AdapterSpec
from protocol.transports.group import RendezvousHost
from protocol.transports.rendezvous import RankReport
from protocol.weights.buckets import make_manifest
from tests.protocol.local_ranks import Waiting
from tests.waiting import TIMEOUT_S, until
from tests.watching import WaitingCollective, transfer

CPU = torch.device("cpu")
MANIFEST = make_manifest([("a", torch.zeros(4))], torch.float32, 1 << 20)


class Server:
    """In place of a member of a fleet."""

    def __init__(self, endpoint: str, devices: list[str], transports: list[str]) -> None:
        self.endpoint, self.link = endpoint, SimpleNamespace(connected=False)
        self.welcome: Any = SimpleNamespace(
            server_id=f"at {endpoint}", num_workers=len(devices), devices=devices, transports=transports,
            max_lora_rank=0,
        )  # fmt: skip


def member(endpoint: str, devices: list[str], transports: list[str]) -> Member:
    return cast(Member, Server(endpoint, devices, transports))


@pytest.mark.parametrize(
    ("own_device", "servers", "groups"),
    [
        ("cpu", {"tcp://127.0.0.1:1": ["cpu"], "tcp://127.0.0.2:1": ["cpu", "cpu"]}, [[0, 1]]),
        ("cpu", {"tcp://127.0.0.1:1": ["cpu"], "tcp://[::1]:1": ["cpu"], "tcp://127.0.0.1:2": ["cpu"]}, [[0, 2], [1]]),
        ("a/1", {"tcp://127.0.0.1:1": ["a/1"], "tcp://127.0.0.1:2": ["a/2", "a/3"], "tcp://127.0.0.1:3": ["a/4"]},
            [[0], [1, 2]]),
        ("a/1", {"tcp://127.0.0.1:1": ["a/2"], "tcp://127.0.0.1:2": ["a/2"]}, [[0], [1]]),  # two servers on one GPU
    ],
)  # fmt: skip
def test_servers_that_one_collective_can_connect_share_a_session(
    monkeypatch: pytest.MonkeyPatch, own_device: str, servers: dict[str, list[str]], groups: list[list[int]]
) -> None:
    all_of_them = ["ipc", "nccl", "tcp"]
    monkeypatch.setattr("learner.servers.sync_session.own_device_name", lambda device: own_device)
    monkeypatch.setattr("learner.servers.sync_session.offered_transports", lambda: all_of_them)
    members = [member(endpoint, devices, all_of_them) for endpoint, devices in servers.items()]
    sessions = SyncSessions(cast(LoopThread, None), WeightSyncConfig(), CPU)
    assert sessions.groups(members, MANIFEST) == ([[members[index] for index in group] for group in groups], {})


def test_a_server_that_is_gone_or_cannot_be_sent_to_or_cannot_apply_the_adapter_is_in_no_group() -> None:
    fit, unfit = member("tcp://127.0.0.1:1", ["cpu"], ["tcp"]), member("tcp://127.0.0.1:2", ["cpu"], ["pigeon"])
    gone = member("tcp://127.0.0.1:3", ["cpu"], ["tcp"])
    cast(Any, gone).welcome = None
    sessions = SyncSessions(cast(LoopThread, None), WeightSyncConfig(), CPU)
    groups, why = sessions.groups([unfit, gone, fit], MANIFEST)
    assert groups == [[fit]] and isinstance(why[unfit], ConfigError) and "no server is connected" in str(why[gone])
    adapted = msgspec.structs.replace(MANIFEST, adapter=AdapterSpec(rank=4, num_tensors=1))
    groups, why = sessions.groups([fit], adapted)
    assert groups == [] and isinstance(why[fit], ConfigError) and "set server.max_lora_rank = 4 there" in str(why[fit])
    cast(Any, fit).welcome.max_lora_rank = 4
    assert sessions.groups([fit], adapted) == ([[fit]], {})


def test_workers_have_their_ranks_in_the_order_of_the_servers_and_a_session_is_of_exactly_its_servers() -> None:
    one, other = member("tcp://127.0.0.1:1", ["cpu"] * 2, ["tcp"]), member("tcp://127.0.0.1:2", ["cpu"] * 3, ["tcp"])
    sessions = SyncSessions(cast(LoopThread, None), WeightSyncConfig(), CPU)
    session = sessions.of([one, other], MANIFEST)
    begins = [session.begin(each, 7).rendezvous for each in (one, other)]
    assert [(begin.first_rank, begin.world_size) for begin in begins if begin] == [(1, 6), (3, 6)]
    assert sessions.of([one, other], MANIFEST) is session
    alone = sessions.of([other], MANIFEST)
    assert alone is not session
    with pytest.raises(PushError, match="the learner abandoned the session"):  # in place of which there is the new one
        session.join()
    sessions.close_all()


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "learner.example")])
def test_servers_on_this_host_connect_to_its_loopback_address_and_others_to_the_advertised_one(
    host: str, expected: str
) -> None:
    with closing(RendezvousHost(host, TIMEOUT_S, advertise="learner.example")) as rendezvous_host:
        assert rendezvous_host.rendezvous(1, "tcp").host == expected


def test_the_last_report_of_the_sync_before_hides_no_worker_that_hangs() -> None:
    rendezvous_host = RendezvousHost("127.0.0.1", TIMEOUT_S)
    one = member("tcp://127.0.0.1:1", ["cpu"], ["tcp"])
    assert one.welcome is not None
    session = SyncSession({one: one.welcome}, MANIFEST, rendezvous_host.rendezvous(1, "tcp"), rendezvous_host, CPU)
    session.begin(one, 7)
    since = time.monotonic() - 60.0
    for version, silent_s in ((6, 60.0), (7, 0.0)):
        rendezvous_host._store.query(RankReport(session.name, 1, "received", version=version))
        assert session.states(since)[1].silent_s == pytest.approx(silent_s, abs=30.0)
    rendezvous_host.close()


@pytest.mark.parametrize("give_up", [SyncSession.abort, SyncSession.close])
def test_a_worker_whose_transport_notices_nothing_is_notified_that_the_learner_gave_up(give_up: Callable) -> None:
    """NCCL within one host: the kernel of a broadcast spins until its communicator is aborted."""
    rendezvous_host = RendezvousHost("127.0.0.1", TIMEOUT_S)
    session = SyncSession({}, MANIFEST, rendezvous_host.rendezvous(1, "tcp"), rendezvous_host, CPU)
    session.collective = WaitingCollective()
    waiting = Waiting(lambda: transfer(session.rendezvous, session.name))
    assert waiting.is_waiting()
    give_up(session)
    assert waiting.ends_promptly(TIMEOUT_S / 2)
    assert (
        f"session {session.name} was canceled: the learner abandoned the session; the transfer failed" in waiting.error
    )
    rendezvous_host.close()


def test_a_receiver_whose_staging_fails_has_left_the_session() -> None:
    """The learner may be gone for good and never tell it to."""
    process = psutil.Process()
    rendezvous_host = RendezvousHost("127.0.0.1", TIMEOUT_S)
    session = SyncSession({}, MANIFEST, rendezvous_host.rendezvous(1, "tcp"), rendezvous_host, CPU)
    receiver = Receiver(0, CPU)
    before = process.num_threads(), process.num_fds()
    receiver.stage(PushOrder(session=session.name, version=1, rendezvous=session.rendezvous, manifest=session.manifest))
    session.join()
    assert session.collective is not None and (process.num_threads(), process.num_fds()) != before
    session.collective.close()
    session.collective = None
    until(lambda: not receiver.is_staging)
    assert isinstance(receiver.failure, PushError)
    # No more than before: a thread that an earlier test has left may end meanwhile.
    until(lambda: process.num_threads() <= before[0] and process.num_fds() <= before[1])
    rendezvous_host.close()
