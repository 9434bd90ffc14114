"""The connection to the reference's server: who has it, and when it is ready."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from learner.servers.loop_thread import LoopThread
from learner.servers.reference_server import ReferenceServer
from protocol.errors import DeadlineExceeded, HandshakeRefused
from protocol.messages import PROTOCOL_VERSION, Hello, ModelFingerprint, new_learner_id
from tests.fakes import ScriptedEngine, ServerThread
from tests.fingerprint import MODEL
from tests.learner.runs import make_run
from tests.learner.servers.fleets import a_fleet
from tests.waiting import until


@contextmanager
def a_reference(tmp_path: Path, endpoint: str, hello: Hello) -> Iterator[ReferenceServer]:
    """Yield the connection of a run to a frozen server."""
    reference = {"kind": "fixed", "endpoint": endpoint}
    run = make_run(tmp_path, "tcp://127.0.0.1:1", kl={"coef": 0.1}, reference=reference, connect_timeout_s=1.0)
    loop = LoopThread("test")
    server = ReferenceServer(run, hello, loop, None)
    server.start()
    try:
        yield server
    finally:
        loop.stop()
        server.fleet.close()


def hello_of(name: str, model: ModelFingerprint = MODEL) -> Hello:
    return Hello(run=name, protocol_version=PROTOCOL_VERSION, model=model, learner=new_learner_id())


def accept(*welcome: object) -> None:
    """Accept every server."""


def wait_for(server: ReferenceServer) -> None:
    until(lambda: server.keep_ready(accept, 0.0), "the reference is not ready")


def test_a_server_that_another_run_has_is_not_reported_as_silent(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine()) as server, a_reference(tmp_path, server.endpoint, hello_of("first")) as first:
        wait_for(first)
        with (
            a_reference(tmp_path, server.endpoint, hello_of("late")) as late,
            pytest.raises(DeadlineExceeded, match=r"reference\.endpoint: .*connect_timeout_s.*busy with run first"),
        ):
            until(lambda: late.fleet.members[0].link.busy, "the server is not busy")
            wait_for(late)


def test_the_policy_and_its_reference_do_not_take_one_server_from_each_other(tmp_path: Path) -> None:
    """If the server has another address for each, the config shows no conflict."""
    with ServerThread(ScriptedEngine()) as server, a_fleet(tmp_path, server.endpoint) as fleet:
        fleet.wait()
        with (
            a_reference(tmp_path, server.endpoint, fleet.hello) as reference,
            pytest.raises(
                DeadlineExceeded, match=r"reference\.endpoint: .*another process of run r has held the server"
            ),
        ):
            until(lambda: reference.fleet.members[0].link.busy, "the server is not busy")
            wait_for(reference)
        assert fleet.is_connected


def test_a_smaller_vocabulary_than_the_policys_is_refused(tmp_path: Path) -> None:
    larger, smaller = (msgspec.structs.replace(MODEL, vocab_size=size) for size in (33, 31))
    with ServerThread(ScriptedEngine()) as server:
        with a_reference(tmp_path, server.endpoint, hello_of("r", smaller)) as reference:
            wait_for(reference)
            reference.close(is_over=True)
        with (
            a_reference(tmp_path, server.endpoint, hello_of("r", larger)) as reference,
            pytest.raises(HandshakeRefused, match=r"33 tokens, that of the server's 32, .*at least 33 tokens"),
        ):
            wait_for(reference)


def test_a_restarted_server_without_the_copy_is_not_ready(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine()) as server, a_reference(tmp_path, server.endpoint, hello_of("r")) as reference:
        wait_for(reference)
        sync: Any = SimpleNamespace(send=lambda version, members: None, holders=lambda version: [])
        reference._sync, reference.version, reference._ready_id = sync, 3, "that of the earlier process"
        assert not reference.keep_ready(accept, 0.0)
