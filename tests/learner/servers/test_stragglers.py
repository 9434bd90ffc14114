"""Who is late in a push is left behind, once others have the weights: a server that hangs does not stop the run."""

import asyncio
import re
import time
from collections.abc import Collection
from typing import Any, cast

import numpy as np
import pytest

from inference_server.engine.interface import PushOrder, WorkerReport
from learner.servers.fan_out import FanOut, Share
from learner.servers.membership import Member
from learner.servers.weight_sync import Stragglers
from learner.servers.weight_transfer import ServerPush
from learner.train import train
from tests.fakes import report
from tests.learner.runs import make_run, metrics_of
from tests.learner.test_several_servers import Engine, assert_each_prompt_once, servers

TIMEOUT_S = 60.0
PATIENCE_S = 0.5
NUM_STEPS = 40
"""More than pass until who was left behind is back."""
NEVER_S = 600.0


class Hanging(Engine):
    """Stands still at some of its visits to a point of a push (or in all its scores from then on), each time until the other
    server has got two more versions: until training has gone on without this one.
    """

    def __init__(self, point: str, visits: Collection[int]) -> None:
        super().__init__()
        self.other = Engine()
        self._point, self._visits = point, visits
        self._num_visits = 0
        self._num_versions = 0
        """The other must have got, for this one to go on."""
        self._give_up_at = 0.0

    async def pause(self) -> None:
        await self._reach("pausing")
        await super().pause()

    async def set_version(self, version: int) -> None:
        await self._reach("labelling")
        await super().set_version(version)

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        await self._reach("scoring")
        return await super().score(token_ids, replica)

    def _load(self, order: PushOrder) -> WorkerReport:
        asyncio.run(self._reach("receiving"))  # in a thread of its own
        return super()._load(order)

    async def _reach(self, point: str) -> None:
        if point != self._point:
            return
        self._num_visits += 1
        if self._num_visits in self._visits:
            self._num_versions, self._give_up_at = len(self.other.versions) + 2, time.monotonic() + TIMEOUT_S
        while len(self.other.versions) < self._num_versions and time.monotonic() < self._give_up_at:
            await asyncio.sleep(0.01)


def failures_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the pusher tells of pushes that failed."""
    told = [record.getMessage() for record in caplog.records if record.name == "learner.servers.weight_sync"]
    return [message for message in told if "failed while" in message]


@pytest.mark.parametrize(
    ("point", "states", "overlap"),
    [
        ("pausing", {"pausing"}, False),
        pytest.param("receiving", {"sending", "finishing"}, True, marks=pytest.mark.slow),
        pytest.param("receiving", {"sending", "finishing"}, False, marks=pytest.mark.slow),
        pytest.param("pausing", {"pausing"}, True, marks=pytest.mark.slow),
        pytest.param("labelling", {"finishing"}, False, marks=pytest.mark.slow),
        pytest.param("labelling", {"finishing"}, True, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_hangs_in_a_push_is_left_behind_and_comes_back(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, point: str, states: set[str], overlap: bool
) -> None:
    hanging = Hanging(point, visits={4})
    with servers(hanging, hanging.other) as (one, two):
        push = {"timeout_s": NEVER_S, "straggler_timeout_s": PATIENCE_S, "overlap_with_training": overlap}
        run = make_run(tmp_path, one.endpoint, two.endpoint, steps=NUM_STEPS, weight_sync=push)
        train(run, resume=False)
    assert_each_prompt_once(run, NUM_STEPS)
    assert hanging.other.versions == list(range(NUM_STEPS + 1)), (
        "a push that is late for one is not sent again to the other"
    )
    told = failures_of(caplog)
    assert (
        len(told) == 1
        and "another server had the version 0.5 s earlier (learner.weight_sync.straggler_timeout_s)" in told[0]
    )
    assert any(
        told[0].startswith(f"weight sync of version 3 to {one.endpoint} failed while {state} ") for state in states
    )
    assert hanging.versions[-1] == NUM_STEPS and metrics_of(run)[-1]["servers/ready"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "state"),
    [
        ("receiving", "joining"),
        ("pausing", "pausing"),
        ("labelling", "finishing"),
    ],
)
def test_a_push_of_its_own_that_gets_no_further_is_given_up_and_tried_again(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, point: str, state: str
) -> None:
    hanging = Hanging(point, visits={4, 5})
    with servers(hanging, hanging.other) as (one, two):
        push = {"timeout_s": NEVER_S, "straggler_timeout_s": PATIENCE_S}
        run = make_run(tmp_path, one.endpoint, two.endpoint, steps=2 * NUM_STEPS, weight_sync=push)
        train(run, resume=False)
    assert_each_prompt_once(run, 2 * NUM_STEPS)
    told = failures_of(caplog)
    assert len(told) == 2 and f" to {one.endpoint} failed while {state} " in told[1]
    assert "it has made no progress for 0.5 s" in told[1] and "(learner.weight_sync.straggler_timeout_s)" in told[1]
    assert hanging.versions[-1] == 2 * NUM_STEPS, "the push after the pause of 2 s went through"


@pytest.mark.parametrize(("is_joining", "visit"), [pytest.param(False, 25, marks=pytest.mark.slow), (True, 55)])
def test_a_server_that_does_not_score_keeps_the_others_waiting_no_longer_than_the_patience(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, is_joining: bool, visit: int
) -> None:
    """16 visits are around the first push; then each version gets 7 or 8 texts after its sync, and before the next one."""
    hanging = Hanging("scoring", visits={visit})
    if is_joining:  # with version 3 by a push of its own, before which nothing is scored
        hanging.reports_from_version[3] = [report(ok=False, state="receiving", error="scripted failure")]
    with servers(hanging, hanging.other) as (one, two):
        push = {"timeout_s": NEVER_S, "straggler_timeout_s": PATIENCE_S}
        run = make_run(tmp_path, one.endpoint, two.endpoint, steps=NUM_STEPS, weight_sync=push)
        train(run, resume=False)
    assert_each_prompt_once(run, NUM_STEPS)
    said = "parity could not be measured" if is_joining else "parity of version 1 could not be checked"
    assert re.search(
        rf"{said}: .* did not score .* within 0\.5 s \(learner\.weight_sync\.straggler_timeout_s\)", caplog.text
    )
    assert hanging.versions[-1] == NUM_STEPS


# --- the rule ----------------------------------------------------------------------------------------------------------


class Recorded:
    """In place of a push under way."""

    def __init__(self) -> None:
        self.moved_at = 0.0
        self.reasons: list[str] = []

    def end(self, reason: str) -> None:
        self.reasons.append(reason)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


def under_way(*pushes: Recorded) -> dict[Member, tuple[ServerPush, Share]]:
    shares = FanOut(len(pushes), 1.0, NEVER_S, NEVER_S).shares
    members = [cast(Member, f"server {index}") for index in range(len(pushes))]
    return {
        member: (cast(ServerPush, push), share) for member, push, share in zip(members, pushes, shares, strict=True)
    }


def test_nobody_is_late_while_nobody_has_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one, other = Clock(monkeypatch), Recorded(), Recorded()
    pushes, have_it = under_way(one, other), set[Member]()
    stragglers = Stragglers(5.0, have_it, set(), others_serve=False)
    clock.now_s += 1000.0
    stragglers.end_late(pushes)
    have_it.add(next(iter(pushes)))
    stragglers.end_late(pushes)
    clock.now_s += 4.9
    other.moved_at = clock.now_s  # which does not count: the others of its push have waited
    stragglers.end_late(pushes)
    assert other.reasons == []
    clock.now_s += 0.2
    stragglers.end_late(pushes)
    assert one.reasons == [] and "another server had the version 5 s earlier" in other.reasons[0]


def test_a_push_of_its_own_may_take_long_but_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, late = Clock(monkeypatch), Recorded()
    pushes = under_way(late)
    stragglers = Stragglers(5.0, set(), set(), others_serve=True)
    for _ in range(10):
        clock.now_s += 4.9
        late.moved_at = clock.now_s
        stragglers.end_late(pushes)
    assert late.reasons == []
    clock.now_s += 5.1
    stragglers.end_late(pushes)
    stragglers.end_late(pushes)
    assert len(late.reasons) == 2 and "no progress for 5 s" in late.reasons[0], (
        "said again, for it may wait elsewhere by now"
    )


def test_who_has_failed_or_has_it_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, has_it, has_failed = Clock(monkeypatch), Recorded(), Recorded()
    pushes = under_way(has_it, has_failed)
    first, second = pushes
    stragglers = Stragglers(5.0, {first}, {second}, others_serve=True)
    stragglers.end_late(pushes)
    clock.now_s += 100.0
    stragglers.end_late(pushes)
    assert has_it.reasons == has_failed.reasons == []


def test_who_was_cut_off_for_keeping_others_waiting_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    late = Recorded()
    pushes = under_way(late)
    ((_, share),) = pushes.values()
    share.cut_off("it kept the others waiting")
    Stragglers(5.0, set(), set(), others_serve=False).end_late(pushes)
    assert late.reasons == ["it kept the others waiting"]
