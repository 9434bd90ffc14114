"""An engine of several replicas stalls when one of them does."""

from types import SimpleNamespace
from typing import Any

import pytest

from inference_server.engine.interface import EngineDead
from inference_server.engine.supervisor import StallDetector


class Watched:
    """A watch with a clock and steps that the test sets."""

    def __init__(self, *num_steps: int | None) -> None:
        self.now = 0.0
        self.engine: Any = SimpleNamespace(num_steps=list(num_steps))
        self._watch = StallDetector(self.engine, lambda: self.now, timeout_s=10)

    def check(self, after_s: float, *num_steps: int | None, num_groups: int = 1) -> None:
        self.now += after_s
        self.engine.num_steps = list(num_steps)
        self._watch.check(num_groups)


def test_one_replica_that_has_requests_and_does_nothing_is_a_stall_though_the_other_goes_on() -> None:
    watched = Watched(0, 0)
    watched.check(0, 1, 5)
    watched.check(9, 2, 5)
    with pytest.raises(
        EngineDead, match=r"replica 1, which has requests, sampled no token for 10 s .* with 1 group running"
    ):
        watched.check(2, 3, 5)


def test_a_replica_that_has_no_request_waits_for_as_long_as_it_likes() -> None:
    watched = Watched(0, 0)
    watched.check(0, 1, 5)
    for step in range(2, 9):
        watched.check(9, step, None)
    watched.check(9, 9, 5)  # its first request in a minute has just come
    with pytest.raises(EngineDead):
        watched.check(11, 10, 5)


def test_without_groups_nothing_stalls() -> None:
    watched = Watched(0)
    for _ in range(3):
        watched.check(60, 0, num_groups=0)
    watched.check(9, 0)
    with pytest.raises(
        EngineDead, match=r"the engine sampled no token for 10 s \(server.stall_timeout_s\) with 1 group running"
    ):
        watched.check(2, 0)
