"""One side of a push is killed, stopped or hangs at every state. Both sides must recover automatically each time."""

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.peer import Pair, Peer
from tests.ports import free_port
from tests.push_peers import DEAD_AFTER_S, NUM_TENSORS
from tests.push_traps import HANG, PUSH_TIMEOUT_S, Trap
from tests.waiting import until

pytestmark = pytest.mark.system

NOTICE_S = 2 * PUSH_TIMEOUT_S + DEAD_AFTER_S + 30.0
"""The join and a broadcast may each take their deadline. The rest is slack for a busy machine."""

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PLAIN: dict[str, Any] = {}
OVERLAP = {"overlap_weight_loading": True, "overlap_with_training": True}
DELTA = {"compression": "delta"}
MID_BUCKET = 6
"""Number of a broadcast: the checksum of the third bucket of a dense push, or of the second of a delta."""
VOCAB_SIZE = 32

State = tuple[str, str, int]
"""Side with the trap, point, and number of visits of the point."""
Fault = tuple[dict[str, Any], int]

BEFORE_READY: State = ("server", "pausing", 1)
BEFORE_JOIN: State = ("server", "joining", 1)
AFTER_MEETING: State = ("server", "forming", 1)
SENDING: State = ("learner", "broadcast", MID_BUCKET)
RECEIVING: State = ("server", "broadcast", MID_BUCKET)
BEFORE_DONE: State = ("server", "labelling", 1)

IN_THE_TRANSFER: list[Fault] = [(PLAIN, KILL), (OVERLAP, STOP), (DELTA, KILL), (PLAIN, STOP)]
BEFORE_AND_AFTER: list[Fault] = [(PLAIN, KILL), (OVERLAP, STOP)]
"""Compression matters only in the states of the transfer."""
MEETING: list[Fault] = [(PLAIN, STOP), (PLAIN, KILL)]
FAULTS = {
    BEFORE_READY: BEFORE_AND_AFTER, BEFORE_JOIN: MEETING, AFTER_MEETING: MEETING, SENDING: IN_THE_TRANSFER,
    RECEIVING: IN_THE_TRANSFER, BEFORE_DONE: BEFORE_AND_AFTER,
}  # fmt: skip


@pytest.fixture
def start_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    started: list[Pair] = []
    numbers = itertools.count()  # pairs are started in several threads

    def start(mode: dict[str, Any]) -> Pair:
        directory = tmp_path / f"pair-{next(numbers)}"
        directory.mkdir()
        pair = Pair(directory, f"tcp://127.0.0.1:{free_port()}", **mode)
        started.append(pair)
        return pair

    yield start
    for pair in started:
        pair.kill()


def in_states(*states: State) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("state", states, ids=["-".join(state[:2]) for state in states])


def at_once(check: Callable[..., None], cells: Sequence[tuple[Any, ...]]) -> None:
    """Run all checks concurrently: each of them mostly waits."""
    with ThreadPoolExecutor(len(cells)) as threads:
        list(threads.map(lambda cell: check(*cell), cells))


def start_at_version_0(start_pair: Callable[..., Pair], mode: dict[str, Any], state: State) -> Pair:
    """Let the server serve version 0. For states of a forming session, make the next push the first of its session."""
    pair = start_pair(mode)
    pair.learner.ask(0)
    if state in (BEFORE_JOIN, AFTER_MEETING):
        pair.learner.kill()
        pair.start_learner()
    return pair


def set_trap(pair: Pair, state: State, victim: Peer, signal_number: int) -> None:
    where, point, nth = state
    trapped = pair.server if where == "server" else pair.learner
    trapped.send(Trap(point, victim.pid, signal_number, nth))


def assert_whole(pair: Pair, version: int, digest: str) -> None:
    """Check that the server serves the learner's weights, the learner gets groups, and none mixes policies."""
    status = pair.server.ask("status")
    assert (status["policy_version"], status["push_state"], status["digest"]) == (version, "idle", digest)
    until(lambda: pair.server.ask("status")["seen"] > status["seen"])
    assert pair.server.ask("status")["torn"] == 0
    taken = pair.learner.ask("take")
    assert len(taken) == 4
    for sampled in taken:
        ((label, num_tokens),) = sampled.versions
        assert label in (version - 1, version)
        assert sampled.token_ids == [label % VOCAB_SIZE] * num_tokens and num_tokens == NUM_TENSORS


def assert_only_torn_weights_wait(server: Peer) -> bool:
    """Check that the server waits only if its weights are torn. Return whether they are."""
    until(lambda: server.ask("status")["push_state"] in ("idle", "torn"))
    before = server.ask("status")
    is_torn = before["push_state"] == "torn"
    if is_torn:
        time.sleep(0.2)
        assert server.ask("status")["seen"] == before["seen"]
    else:
        until(lambda: server.ask("status")["seen"] > before["seen"])
    assert server.ask("status")["torn"] == 0
    return is_torn


@in_states(BEFORE_READY, BEFORE_JOIN, AFTER_MEETING, SENDING, BEFORE_DONE)
def test_a_server_survives_its_learner(start_pair: Callable[..., Pair], state: State) -> None:
    def check(mode: dict[str, Any], signal_number: int) -> None:
        pair = start_at_version_0(start_pair, mode, state)
        set_trap(pair, state, pair.learner, signal_number)
        pair.learner.send(1)
        pair.learner.wait_until_struck(signal_number)
        # With overlap, all data has arrived when the server pauses.
        if state != BEFORE_DONE and (state, mode) != (BEFORE_READY, OVERLAP):
            said = pair.server.wait_for_log("weight sync of version 1 in session", NOTICE_S)
            assert re.search(r"in session \w{8} failed while receiving: worker 0 failed while receiving: ", said)
            if state not in (BEFORE_JOIN, AFTER_MEETING):
                assert "bucket" in said and (signal_number == KILL or "learner.weight_sync.timeout_s" in said)
        may_be_torn = state == SENDING and mode != OVERLAP
        is_torn = assert_only_torn_weights_wait(pair.server)
        # Data in the kernel's buffers is lost with a killed learner, so the first bucket may be missing.
        assert is_torn == may_be_torn or (may_be_torn and signal_number == KILL)
        if signal_number == KILL:
            digest = pair.start_learner().ask(1)
        else:
            pair.learner.go_on()
            digest = pair.learner.receive()
        assert_whole(pair, 1, digest)
        assert_whole(pair, 2, pair.learner.ask(2))

    at_once(check, FAULTS[state])


@in_states(BEFORE_READY, BEFORE_JOIN, AFTER_MEETING, RECEIVING, BEFORE_DONE)
def test_a_learner_survives_its_server(start_pair: Callable[..., Pair], state: State) -> None:
    def check(mode: dict[str, Any], signal_number: int) -> None:
        pair = start_at_version_0(start_pair, mode, state)
        set_trap(pair, state, pair.server, signal_number)
        pair.learner.send(1)
        pair.server.wait_until_struck(signal_number)
        pair.learner.wait_for_log("weight sync of version 1 failed while", NOTICE_S)
        if signal_number == KILL:
            pair.server.kill()
            pair.start_server()
        else:
            pair.server.go_on()
        assert_whole(pair, 1, pair.learner.receive())
        assert_whole(pair, 2, pair.learner.ask(2))

    at_once(check, FAULTS[state])


HANGS = {
    BEFORE_READY: r"while pausing .*no PushReady for version 1 in session \w{8} .*within 1.5 s",
    BEFORE_JOIN: r"while joining .*session \w{8} did not form within 1.5 s .*: missing rank 1$",
    AFTER_MEETING: r"while joining .*session \w{8} did not form within 1.5 s .*: missing link of rank 1$",
    # The kernel may have taken all bytes.
    RECEIVING: r"while (sending|finishing) .*(bucket [3-6].* \d{7,} bytes .*|no PushDone .* in )session \w{8}.*1.5 s",
    BEFORE_DONE: r"while finishing .*no PushDone for version 1 in session \w{8} .*1.5 s after the last of 12583008 "
    r"bytes",
}


def test_a_hanging_server_is_given_up_with_a_helpful_error(start_pair: Callable[..., Pair]) -> None:
    """It still sends heartbeats: only the deadline of the state shows the hang."""

    def check(state: State) -> None:
        pair = start_at_version_0(start_pair, PLAIN, state)
        set_trap(pair, state, pair.server, HANG)
        pair.learner.send(1)
        said = pair.learner.wait_for_log("weight sync of version 1 failed", NOTICE_S)
        assert re.search(HANGS[state], said) and "learner.weight_sync.timeout_s" in said, said
        assert_whole(pair, 1, pair.learner.receive())

    at_once(check, [(state,) for state in HANGS])


NUM_FAILURES = 10
FEW = 5
"""Worker threads and timers may start or end at any moment. A leak is at least one per failure."""


def test_a_side_leaks_no_resources_when_the_other_side_dies_many_times(start_pair: Callable[..., Pair]) -> None:
    """Kill in the middle of the transfer, which the survivor notices immediately."""

    def check(survivor: str) -> None:
        pair = start_pair(OVERLAP)
        pair.learner.ask(0)
        before = getattr(pair, survivor).resources()
        for version in range(1, NUM_FAILURES + 1):
            if survivor == "server":
                set_trap(pair, SENDING, pair.learner, KILL)
                pair.learner.send(version)
                pair.learner.wait_until_struck(KILL)
                pair.learner.kill()
                pair.start_learner()
            else:
                set_trap(pair, RECEIVING, pair.server, KILL)
                pair.learner.send(version)
                pair.server.wait_until_struck(KILL)
                pair.server.kill()
                pair.start_server()
                assert_whole(pair, version, pair.learner.receive())
        last = NUM_FAILURES + 1
        assert_whole(pair, last, pair.learner.ask(last))
        until(lambda: is_settled(getattr(pair, survivor).resources(), before))  # an abandoned push ends in its thread

    at_once(check, [("server",), ("learner",)])


def is_settled(now: dict[str, int], before: dict[str, int]) -> bool:
    return all(now[name] <= number + FEW for name, number in before.items())
