"""The other side of a push is killed or stopped at every state; each time both must be whole again, by themselves."""

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.push_peers import DEAD_AFTER_S, PUSH_TIMEOUT_S, Pair, Peer, Trap

NOTICE_S = 2 * PUSH_TIMEOUT_S + DEAD_AFTER_S + 3.0
"""The join and a broadcast may each take their deadline; the rest is for a machine that has other work."""

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PLAIN: dict[str, Any] = {}
OVERLAP = {"receive_overlap": True, "overlap": True}
DELTA = {"wire": "delta"}

LEARNER_STATES = [
    # Where the trap stands, its point, and how often it must be reached.
    ("server", "pausing", 1),  # before ready
    ("server", "joining", 1),  # ready is on its way
    ("server", "forming", 1),  # all have met
    ("learner", "broadcast", 4),  # the first bucket has been sent, the second one without its checksum
    ("server", "labelling", 1),  # before done
]
SERVER_STATES = [
    ("server", "pausing", 1),
    ("server", "joining", 1),
    ("server", "forming", 1),
    ("server", "broadcast", 4),
    ("server", "labelling", 1),
]


@pytest.fixture
def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return f"tcp://127.0.0.1:{holder.getsockname()[1]}"


@pytest.fixture
def pairs(tmp_path: Path, endpoint: str) -> Iterator[list[Pair]]:
    started: list[Pair] = []
    yield started
    for pair in started:
        pair.kill()


def id_of(value: object) -> str:
    if isinstance(value, dict):
        return "+".join(value) or "plain"
    return value[1] if isinstance(value, tuple) else str(getattr(value, "name", value))


def until(condition: Any, timeout_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def begin(pair: Pair, state: tuple[str, str, int]) -> None:
    """Have version 0 served, and let the next push be the first of its epoch if it is to be caught while that is joined."""
    pair.learner.ask(0)
    if state[1] in ("joining", "forming"):
        pair.learner.kill()
        pair.start_learner()


def set_trap(pair: Pair, state: tuple[str, str, int], victim: Peer, signal_number: int) -> None:
    where, point, nth = state
    trapped = pair.server if where == "server" else pair.learner
    trapped.send(Trap(point, victim.pid, signal_number, nth))


def assert_whole(pair: Pair, version: int, digest: str) -> None:
    """The server serves what the learner sent, the learner gets groups of it, and no completion was ever of two policies."""
    status = pair.server.ask("status")
    assert (status["policy_version"], status["push_state"], status["digest"]) == (version, "idle", digest)
    until(lambda: pair.server.ask("status")["seen"] > status["seen"])
    assert pair.server.ask("status")["torn"] == 0
    for versions, token_ids in pair.learner.ask("take"):
        assert len(token_ids) == 6 and len(set(token_ids)) == 1
        assert version - 1 <= token_ids[0] <= version and versions == [(token_ids[0], 6)]


def assert_goes_on_or_waits(server: Peer) -> None:
    """A server whose learner is gone generates with what it had, or not at all."""
    before = server.ask("status")
    if before["push_state"] == "torn":
        time.sleep(0.1)
        assert server.ask("status")["seen"] == before["seen"]
    else:
        until(lambda: server.ask("status")["seen"] > before["seen"])
    assert server.ask("status")["torn"] == 0


@pytest.mark.parametrize("mode", [PLAIN, OVERLAP], ids=id_of)
@pytest.mark.parametrize("signal_number", [KILL, STOP], ids=id_of)
@pytest.mark.parametrize("state", LEARNER_STATES, ids=id_of)
def test_a_server_survives_its_learner(
    pairs: list[Pair], tmp_path: Path, endpoint: str, state: tuple[str, str, int], signal_number: int, mode: dict
) -> None:
    pair = Pair(tmp_path, endpoint, **mode)
    pairs.append(pair)
    begin(pair, state)
    set_trap(pair, state, pair.learner, signal_number)
    pair.learner.send(1)
    pair.learner.wait_until_struck(signal_number)
    if state[1] != "labelling" and not (state[1] == "pausing" and mode):  # then everything has arrived
        pair.server.wait_for_log("push of version 1 failed while", NOTICE_S)
    assert_goes_on_or_waits(pair.server)
    if signal_number == KILL:
        digest = pair.start_learner().ask(1)
    else:
        pair.learner.go_on()
        digest = pair.learner.receive()
    assert_whole(pair, 1, digest)
    assert_whole(pair, 2, pair.learner.ask(2))


@pytest.mark.parametrize("mode", [PLAIN, OVERLAP], ids=id_of)
@pytest.mark.parametrize("signal_number", [KILL, STOP], ids=id_of)
@pytest.mark.parametrize("state", SERVER_STATES, ids=id_of)
def test_a_learner_survives_its_server(
    pairs: list[Pair], tmp_path: Path, endpoint: str, state: tuple[str, str, int], signal_number: int, mode: dict
) -> None:
    pair = Pair(tmp_path, endpoint, **mode)
    pairs.append(pair)
    begin(pair, state)
    set_trap(pair, state, pair.server, signal_number)
    pair.learner.send(1)
    pair.server.wait_until_struck(signal_number)
    pair.learner.wait_for_log("push of version 1 failed", NOTICE_S)
    if signal_number == KILL:
        pair.server.kill()
        pair.start_server()
    else:
        pair.server.go_on()
    digest = pair.learner.receive()
    assert_whole(pair, 1, digest)
    assert_whole(pair, 2, pair.learner.ask(2))
