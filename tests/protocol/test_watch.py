"""The watch over a transfer: what ends it, and what it leaves alone."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

import protocol.watch
from protocol.collective import Meeting
from protocol.errors import PushFailed
from protocol.watch import watched

INTERVAL_S = 0.05
LONG_S = 30.0
EPOCH = "epoch"


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.watch, "INTERVAL_S", INTERVAL_S)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting("127.0.0.1", LONG_S)
    yield meeting
    meeting.close()


class WaitingCollective:
    """Its broadcasts end only when they are aborted."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert self.aborted.wait(LONG_S)
        raise PushFailed("the broadcast was aborted")

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.abort()


def transfer(collective: WaitingCollective, meeting: Meeting) -> None:
    with watched(collective, EPOCH, meeting.rendezvous(1, "gloo")):
        collective.broadcast(torch.empty(1))


def test_a_transfer_ends_when_the_learner_gives_its_epoch_up(meeting: Meeting) -> None:
    meeting.call_off(EPOCH, "it had to")
    expected = "epoch epoch was called off: it had to; the transfer ended in the broadcast was aborted"
    with pytest.raises(PushFailed, match=expected):
        transfer(WaitingCollective(), meeting)


def test_a_transfer_ends_when_the_learner_is_gone(meeting: Meeting) -> None:
    meeting.close()
    with pytest.raises(PushFailed, match=r"cannot reach the learner's rendezvous .*; the transfer ended in the broad"):
        transfer(WaitingCollective(), meeting)


def test_a_transfer_goes_on_while_the_learner_answers(meeting: Meeting) -> None:
    collective = WaitingCollective()
    with watched(collective, EPOCH, meeting.rendezvous(1, "gloo")):
        assert not collective.aborted.wait(10 * INTERVAL_S)


def test_what_comes_after_a_transfer_is_not_ended_with_its_epoch(meeting: Meeting) -> None:
    collective = WaitingCollective()
    with watched(collective, EPOCH, meeting.rendezvous(1, "gloo")):
        time.sleep(3 * INTERVAL_S)
    meeting.call_off(EPOCH, "it is over")
    assert not collective.aborted.wait(10 * INTERVAL_S)


def test_another_failure_of_a_transfer_stays_as_it_is(meeting: Meeting) -> None:
    with (
        pytest.raises(PushFailed, match=r"^another$"),
        watched(WaitingCollective(), EPOCH, meeting.rendezvous(1, "gloo")),
    ):
        raise PushFailed("another")
