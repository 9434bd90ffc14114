"""An unexpected exception costs its own request: thrown at each call of a task in turn, for each kind of message."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from inference_server.config import ServerConfig
from inference_server.engine import containment
from inference_server.engine.interface import EngineDead, Sampled
from inference_server.server import Server
from protocol.channel.sockets import LearnerChannel, ServerChannel
from protocol.messages import (
    Ack,
    Cancel,
    Completion,
    Farewell,
    Group,
    GroupFailed,
    Message,
    Probe,
    Pulse,
    PushAbort,
    PushDone,
    PushFailed,
    Sampling,
    ServerInfo,
    Trial,
    TrialResult,
    Welcome,
)
from tests.fakes import ScriptedEngine, Serving, report, serving
from tests.fingerprint import MODEL
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import NOBODY, TIMEOUT_S, Test, begin, run_with_server, until


class Boom(Exception):
    """What nobody expects."""


class Thrower:
    """Throws at the n-th call into the engine or the channel, counted from when it is armed."""

    def __init__(self, *, afterwards: bool) -> None:
        self._afterwards = afterwards
        """Throw when the call has been done, else in its place."""
        self._left = 0
        self._tasks: Callable[[str], bool] = bool
        self._has_thrown = False

    def arm(self, number: int, tasks: Callable[[str], bool] = lambda name: name not in ("pulse", "engine")) -> None:
        """Throw at this call, of those that tasks of such names make."""
        self._left, self._tasks, self._has_thrown = number, tasks, False

    def disarm(self) -> bool:
        """Return whether it has thrown."""
        self._left = 0
        return self._has_thrown

    def _is_due(self) -> bool:
        task = asyncio.current_task()
        if self._left == 0 or task is None or not self._tasks(task.get_name()):
            return False
        self._left -= 1
        self._has_thrown = self._left == 0
        return self._has_thrown

    def throwing(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def called(*args: Any, **options: Any) -> Any:
            is_due = self._is_due()
            if is_due and not self._afterwards:
                raise Boom
            result = await call(*args, **options)
            if is_due:
                raise Boom
            return result

        return called

    def throwing_iterator(self, call: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def called(*args: Any) -> AsyncIterator[Any]:
            if self._is_due():
                raise Boom
            async for one in call(*args):
                yield one
                if self._is_due():
                    raise Boom

        return called

    def wrap(self, engine: ScriptedEngine, running: Serving) -> None:
        for name in ("score", "pause", "resume", "stage_push", "load_push", "leave_session", "set_version"):
            setattr(engine, name, self.throwing(getattr(engine, name)))
        engine.generate = self.throwing_iterator(engine.generate)  # type: ignore[method-assign]
        channel = running.server._channel
        channel.send = self.throwing(channel.send)  # type: ignore[method-assign]
        if not self._afterwards:  # a message that was taken is not lost between two lines
            channel.receive = self.throwing(channel.receive)  # type: ignore[method-assign]


pytestmark = pytest.mark.usefixtures("look_often", "pulse_often")


@pytest.fixture(autouse=True)
def every_traceback_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containment, "_reports", {})
    monkeypatch.setattr("inference_server.server.RECEIVE_PAUSE_S", 0.001)


async def push(engine: ScriptedEngine, learner: ScriptedLearner, version: int, session: str) -> None:
    """With reports for a server that stages too."""
    engine.scripted_reports[:] = [[report()], [report()]]
    await learner.send(begin(version, session))
    await learner.receive(PushDone)


# --- what is sent, and what answers it -------------------------------------------------------------------------------

Ask = Callable[[ScriptedEngine, ScriptedLearner], Awaitable[None]]


async def ask_for_a_group(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
    """As a learner does: again, when it fails in a way that may pass."""
    await learner.generate("asked", [1])
    await all_come(learner, {"asked"})


async def ask_for_a_score(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
    scores = await learner.score([1, 2])
    assert scores.error is None or "unexpected Boom" in scores.error


async def push_once(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
    engine.scripted_reports[:] = [[report()], [report()]]
    await learner.send(begin(7, "pushed"))
    answer = await learner.receive((PushDone, PushFailed))
    assert isinstance(answer, PushDone) or ("unexpected Boom" in answer.message and answer.retryable)


async def greet_anew(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
    """On a new connection, over which the server sends again what it keeps."""
    endpoint = learner.channel.endpoint
    learner.channel.close()
    learner.channel, learner.unread = LearnerChannel(endpoint), []
    await greet(learner)


async def greet(learner: ScriptedLearner) -> None:
    """Until it is welcomed, as a learner does."""
    while True:
        await learner.hello()
        with contextlib.suppress(TimeoutError):
            await learner.receive(Welcome, timeout_s=0.25)
            return


async def probe(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
    while True:
        await learner.send(Probe(probe_id="asked"))
        with contextlib.suppress(TimeoutError):
            await learner.receive(ServerInfo, timeout_s=0.25)
            return


def says(message: Message) -> Ask:
    """What gets no answer."""

    async def say(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
        await learner.send(message)

    return say


async def try_the_way(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
    await learner.send(Trial(trial_id="asked", num_bytes=8, rendezvous=NOBODY))
    assert (await learner.receive(TrialResult)).error


ASKED: dict[str, Ask] = {
    "Hello": greet_anew, "Generate": ask_for_a_group, "Score": ask_for_a_score, "PushBegin": push_once,
    "PushAbort": says(PushAbort(session="first")), "Ack": says(Ack(group_ids=["other"])),
    "Cancel": says(Cancel(group_ids=["other"])), "Farewell": says(Farewell()), "Probe": probe, "Trial": try_the_way,
}  # fmt: skip


# --- the story -------------------------------------------------------------------------------------------------------


class HoldingEngine(ScriptedEngine):
    """Holds the completions of one prompt back."""

    HELD: ClassVar = [4]

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()

    async def sample(self, prompt_token_ids: np.ndarray, sampling: Sampling) -> tuple[list[Completion], int]:
        if prompt_token_ids.tolist() == self.HELD:
            await self.let_go.wait()
        return await super().sample(prompt_token_ids, sampling)


async def all_come(learner: ScriptedLearner, group_ids: set[str]) -> None:
    """Wait for groups; one that fails is asked for again, as a learner does."""
    while group_ids:
        answer = await learner.receive((Group, GroupFailed))
        if isinstance(answer, Group):
            group_ids = group_ids - {answer.group_id}
        else:
            await ask_again(learner, answer)


async def ask_again(learner: ScriptedLearner, failed: GroupFailed) -> None:
    assert (failed.code, failed.retryable) == ("engine_error", True) and "unexpected Boom" in failed.message
    await learner.generate(failed.group_id, [1])


async def serves_on(engine: HoldingEngine, running: Serving, learner: ScriptedLearner) -> None:
    """The next requests are served, and nothing of what ran or was kept meanwhile is lost."""
    assert not running.task.done()
    await learner.join()
    await push(engine, learner, 9, "next")
    await learner.generate("next", [3])
    engine.let_go.set()
    await learner.generate("held", engine.HELD)  # it is still there, unless the engine has been started again
    await all_come(learner, {"next", "held"})
    for message in learner.unread:
        if isinstance(message, GroupFailed):
            await ask_again(learner, message)
    learner.channel.close()  # while it is connected, no other process of its run gets the server
    another = ScriptedLearner(running.endpoint)
    try:
        await greet(another)
        await all_come(another, {"kept", "next", "held"})
    finally:
        another.close()


async def story(ask: Ask, number: int, *, afterwards: bool, **options: Any) -> bool:
    """Throw at the n-th call while a message is answered. False if there is no such call."""
    engine, thrower = HoldingEngine(), Thrower(afterwards=afterwards)
    async with serving(engine, ServerConfig(**options)) as running:
        thrower.wrap(engine, running)
        learner = ScriptedLearner(running.endpoint)
        try:
            await learner.join()
            await push(engine, learner, 1, "first")
            await learner.generate("kept", [5])
            await learner.receive(Group)
            await learner.generate("held", engine.HELD)
            while running.server.status()["groups_running"] == 0:
                await asyncio.sleep(0.001)
            thrower.arm(number)
            await ask(engine, learner)
            for _ in range(2):  # what has no answer is over
                await learner.receive(Pulse)
            has_thrown = thrower.disarm()
            await serves_on(engine, running, learner)
        finally:
            learner.close()
    return has_thrown


@pytest.mark.parametrize("afterwards", [False, True])
@pytest.mark.parametrize(("kind", "options", "num_calls"), [
    ("Hello", {}, 2), ("Generate", {}, 2), ("Score", {}, 2), ("PushBegin", {}, 6),
    ("PushBegin", {"overlap_weight_loading": True}, 7), ("PushAbort", {}, 1), ("Ack", {}, 0), ("Cancel", {}, 0),
    ("Farewell", {}, 0), ("Probe", {}, 1), ("Trial", {}, 1),
])  # fmt: skip
def test_an_exception_at_any_call_costs_its_own_request_alone(
    kind: str, options: dict[str, Any], num_calls: int, afterwards: bool
) -> None:
    number = 1
    while asyncio.run(asyncio.wait_for(story(ASKED[kind], number, afterwards=afterwards, **options), TIMEOUT_S)):
        number += 1
    assert number > num_calls


def run_with_holding_server(test: Test, engine: type[HoldingEngine] = HoldingEngine) -> None:
    """Run a test with a learner that has been welcomed and has pushed."""

    async def prepared(engine: Any, running: Serving, learner: ScriptedLearner) -> None:
        await learner.join()
        await push(engine, learner, 1, "first")
        await test(engine, running, learner)

    run_with_server(prepared, make_engine=engine)


@pytest.mark.parametrize("number", [1, 2])
def test_the_pulse_goes_on_after_an_exception(number: int) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        async def pulses_come() -> None:
            for _ in range(3):
                await learner.receive(Pulse)

        thrower = Thrower(afterwards=False)
        thrower.wrap(engine, running)
        thrower.arm(number, lambda name: name == "pulse")
        await pulses_come()
        assert thrower.disarm()
        running.server._channel.poll_connections = raising  # type: ignore[method-assign]
        await pulses_come()

    run_with_holding_server(test)


def raising(*_: object) -> Any:
    raise Boom


def test_a_look_at_groups_and_engine_that_raises_costs_that_look() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        num_looks = 0

        def look(*_: object) -> None:
            nonlocal num_looks
            num_looks += 1
            raise Boom

        running.server._groups.time_out_stalled = look  # type: ignore[method-assign]
        await until(lambda: num_looks == 3)
        await push(engine, learner, 2, "next")

    run_with_holding_server(test)


@pytest.mark.parametrize("call", ["restart", "places"])
def test_an_exception_while_the_engine_is_started_again_is_one_more_death_of_it(call: str) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        good, calls = getattr(engine, call), 0

        async def bad_once() -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise Boom
            return await good()

        setattr(engine, call, bad_once)
        engine.fail_with = EngineDead("it is gone")
        await until(lambda: calls == 2)
        await learner.join()
        await push(engine, learner, 1, "next")

    run_with_holding_server(test)


def test_a_group_that_takes_long_to_end_at_its_deadline_ends_nothing_else() -> None:
    ended = asyncio.Event()

    class SlowToEnd(HoldingEngine):
        async def generate(self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str) -> AsyncIterator[Sampled]:
            completions, version = await self.sample(prompt_token_ids, sampling)
            yield Sampled(entered_version=version, salt="s", completions=dict(enumerate(completions[:1])))
            try:
                await asyncio.Event().wait()
            finally:
                await ended.wait()

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await learner.generate("slow", [1], deadline_s=0.01)
        await asyncio.sleep(0.3)  # many looks after its deadline
        assert not containment._reports
        ended.set()
        assert (await learner.receive(GroupFailed)).code == "deadline"

    run_with_holding_server(test, SlowToEnd)


def test_a_socket_that_fails_again_and_again_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.server.MAX_RECEIVE_FAILURES", 5)

    async def run() -> None:
        with contextlib.closing(ServerChannel("tcp://127.0.0.1:*")) as channel:
            channel.receive = raising  # type: ignore[method-assign]
            with pytest.raises(ExceptionGroup) as caught:
                await Server(channel, HoldingEngine(), MODEL, ServerConfig()).serve()
            assert caught.group_contains(Boom)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_one_place_that_raises_is_logged_with_its_traceback_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one() -> None:
        with containment.log_unexpected("testing"):
            raising()

    for _ in range(3):
        one()
    with containment.log_unexpected("testing"):
        raise ValueError("another place")
    first, other = caplog.records
    assert first.message.startswith("unexpected Boom while testing") and first.exc_info and first.exc_info[0] is Boom
    assert "ValueError" in other.message
    monkeypatch.setattr(containment, "REPORT_INTERVAL_S", 0.0)
    one()
    assert "2 more since the last report" in caplog.records[-1].message


def test_the_engines_death_and_a_cancellation_are_not_contained() -> None:
    async def run() -> None:
        async def die() -> None:
            raise EngineDead("it is gone")

        with pytest.raises(EngineDead):
            await containment.run_contained(die(), "testing")
        waiting = asyncio.create_task(containment.run_contained(asyncio.Event().wait(), "testing"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
