"""An unexpected exception fails only its own request: raised at each call of each task, for each kind of message."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from inference_server.config import ServerConfig
from inference_server.engine import containment
from inference_server.engine.interface import EngineDead, PushOrder, Sampled, WorkerReport
from inference_server.server import Server
from protocol.channel.sockets import LearnerChannel, ServerChannel
from protocol.messages import (
    Completion,
    Group,
    GroupFailed,
    Message,
    Probe,
    Pulse,
    PushAbort,
    PushDone,
    PushFailed,
    PushReady,
    Sampling,
    Score,
    Scores,
    ServerInfo,
    Trial,
    TrialResult,
    Welcome,
)
from tests.fakes import ScriptedEngine, report
from tests.fingerprint import MODEL
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import NOBODY, TIMEOUT_S, Stage, begin, until, with_server

SILENCE_S = 0.25


class Boom(Exception):
    """An unexpected exception."""


def fail_once(at: Stage, name: str, kind: type = object, *, afterwards: bool = False) -> list[str]:
    """Make the next call of this name to engine or channel raise: instead of the call, or `afterwards`.

    For sends, the next message of this kind. The returned list is empty once the call has raised.
    """
    owner: Any = at.running.server._channel if name in ("send", "receive") else at.engine
    good, left = getattr(owner, name), [name]

    async def call(*args: Any) -> Any:
        is_due = bool(left) and (name != "send" or isinstance(args[1], kind))
        if is_due:
            left.clear()
        if is_due and not afterwards:
            raise Boom
        result = await good(*args)
        if is_due:
            raise Boom
        return result

    setattr(owner, name, call)
    return left


pytestmark = pytest.mark.usefixtures("look_often", "pulse_often")


@pytest.fixture(autouse=True)
def every_traceback_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containment, "_reports", {})
    monkeypatch.setattr("inference_server.server.RECEIVE_PAUSE_S", 0.001)


# --- what is sent, and what answers it -------------------------------------------------------------------------------

Ask = Callable[[Stage], Awaitable[None]]


def asks(message: Message, *answers: type, patience_s: float = TIMEOUT_S) -> Ask:
    """Return a function that sends a message, with retries, until one of `answers` without an error arrives."""

    async def ask(at: Stage) -> None:
        while True:
            await at.learner.send(message)
            if not answers:
                return
            with contextlib.suppress(TimeoutError):
                answer: Any = await at.learner.receive(answers, timeout_s=patience_s)
                why = answer.error if isinstance(answer, Scores) else getattr(answer, "message", None)
                assert why is None or "unexpected Boom" in why
                return

    return ask


async def ask_for_a_group(at: Stage) -> None:
    """Request a group, and retry retryable failures, as a learner does."""
    await at.learner.generate("asked", [1])
    await all_come(at.learner, {"asked"})


async def greet_anew(at: Stage) -> None:
    """Greet on a new connection, over which the server resends what it keeps."""
    at.learner.channel.close()
    at.learner.channel, at.learner.unread = LearnerChannel(at.running.endpoint), []
    await greet(at.learner)


async def greet(learner: ScriptedLearner) -> None:
    """Greet until welcomed, as a learner does."""
    while True:
        await learner.hello()
        with contextlib.suppress(TimeoutError):
            await learner.receive(Welcome, timeout_s=SILENCE_S)
            return


ASKED: dict[str, Ask] = {
    "Hello": greet_anew,
    "Generate": ask_for_a_group,
    "Score": asks(Score(request_id="s", token_ids=np.array([1, 2], np.int32), deadline_s=TIMEOUT_S), Scores),
    "PushBegin": asks(begin(7, "pushed"), PushDone, PushFailed),
    "PushAbort": asks(PushAbort(session="e1")),
    "Probe": asks(Probe(probe_id="asked"), ServerInfo, patience_s=SILENCE_S),
    "Trial": asks(Trial(trial_id="asked", num_bytes=8, rendezvous=NOBODY), TrialResult),
}


# --- the story -------------------------------------------------------------------------------------------------------


class HoldingEngine(ScriptedEngine):
    """Holds the completions of one prompt back, and accepts every push."""

    HELD: ClassVar = [4]

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()

    async def sample(self, prompt_token_ids: np.ndarray, sampling: Sampling) -> tuple[list[Completion], int]:
        if prompt_token_ids.tolist() == self.HELD:
            await self.let_go.wait()
        return await super().sample(prompt_token_ids, sampling)

    async def stage_push(self, order: PushOrder) -> Sequence[WorkerReport]:
        return [report()]

    async def load_push(self, order: PushOrder) -> Sequence[WorkerReport]:
        return [report()]


async def all_come(learner: ScriptedLearner, group_ids: set[str]) -> None:
    """Wait for groups, and retry failed ones, as a learner does."""
    while group_ids:
        answer = await learner.receive((Group, GroupFailed))
        if isinstance(answer, Group):
            group_ids = group_ids - {answer.group_id}
        else:
            await ask_again(learner, answer)


async def ask_again(learner: ScriptedLearner, failed: GroupFailed) -> None:
    assert (failed.code, failed.retryable) == ("engine_error", True) and "unexpected Boom" in failed.message
    await learner.generate(failed.group_id, [1])


async def serves_on(at: Stage) -> None:
    """Check that the next requests are served, and that no running or kept group is lost."""
    assert not at.running.task.done()
    await at.learner.join()
    await at.push(9, "next")
    await at.learner.generate("next", [3])
    at.engine.let_go.set()  # type: ignore[attr-defined]
    await at.learner.generate("held", HoldingEngine.HELD)  # still running, unless the engine has restarted
    await all_come(at.learner, {"next", "held"})
    for message in at.learner.unread:
        if isinstance(message, GroupFailed):
            await ask_again(at.learner, message)
    at.learner.channel.close()  # no other process of its run gets the server while it is connected
    another = ScriptedLearner(at.running.endpoint)
    try:
        await greet(another)
        await all_come(another, {"kept", "next", "held"})
    finally:
        another.close()


async def story(at: Stage, ask: Ask, call: tuple[Any, ...], *, afterwards: bool) -> None:
    """Make a call raise while a message is answered."""
    await at.join_and_push(1)
    await at.learner.group("kept", [5])
    await at.learner.generate("held", HoldingEngine.HELD)
    await until(lambda: at.status()["groups_running"] == 1)
    left = fail_once(at, *call, afterwards=afterwards)
    await ask(at)
    await until(lambda: not left)  # a message without an answer may still be in flight
    # A sync that starts while the engine is replaced gets no answer; the next pulse shows the learner the new engine.
    for _ in range(2):
        await at.learner.receive(Pulse)
    await serves_on(at)


@pytest.mark.parametrize("afterwards", [False, True], ids=["instead of the call", "afterwards"])
@pytest.mark.parametrize(
    ("message_name", "call"),
    [
        ("Hello", ("send", Welcome)), ("Generate", ("sample",)), ("Generate", ("send", Group)), ("Score", ("score",)),
        ("Score", ("send", Scores)), ("PushBegin", ("pause",)), ("PushBegin", ("send", PushReady)),
        ("PushBegin", ("load_push",)), ("PushBegin", ("set_version",)), ("PushBegin", ("resume",)),
        ("PushBegin", ("send", PushDone)), ("PushAbort", ("leave_session",)), ("Probe", ("send", ServerInfo)),
        ("Trial", ("send", TrialResult)),
    ],
)  # fmt: skip
@with_server(make_engine=HoldingEngine)
async def test_an_exception_at_any_call_fails_only_its_own_request(
    at: Stage, message_name: str, call: tuple[Any, ...], afterwards: bool
) -> None:
    await story(at, ASKED[message_name], call, afterwards=afterwards)


@pytest.mark.parametrize("afterwards", [False, True], ids=["instead of the call", "afterwards"])
@with_server(make_engine=HoldingEngine, config=ServerConfig(overlap_weight_loading=True))
async def test_an_exception_while_a_push_is_received_during_generation_fails_the_push(
    at: Stage, afterwards: bool
) -> None:
    await story(at, ASKED["PushBegin"], ("stage_push",), afterwards=afterwards)


@with_server(make_engine=HoldingEngine)
async def test_an_exception_while_a_message_is_received_has_no_effect(at: Stage) -> None:
    await story(at, ask_for_a_group, ("receive",), afterwards=False)


@with_server()
async def test_a_group_whose_sending_raised_is_generated_again(at: Stage) -> None:
    await at.join_and_push()
    fail_once(at, "send", Group)
    await ask_for_a_group(at)
    assert at.engine.prompts == [[1], [1]]


@pytest.mark.parametrize("call", [("send", Pulse), ("poll_connections",), ("pop_failed_handshakes",)])
@with_server()
async def test_pulses_continue_after_an_exception(
    at: Stage, call: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    await at.join_and_push()
    if call[0] == "send":
        left = fail_once(at, *call)
        await until(lambda: not left)
    else:
        monkeypatch.setattr(at.running.server._channel, call[0], raising)
    for _ in range(3):
        await at.learner.receive(Pulse)


def raising(*_: object) -> Any:
    raise Boom


@with_server()
async def test_an_exception_in_a_check_of_groups_and_engine_skips_only_that_check(at: Stage) -> None:
    await at.join_and_push()
    num_looks = 0

    def look(*_: object) -> None:
        nonlocal num_looks
        num_looks += 1
        raise Boom

    at.running.server._groups.time_out_stalled = look  # type: ignore[method-assign]
    await until(lambda: num_looks == 3)
    await at.push(2, "next")


@pytest.mark.parametrize("call", ["restart", "workers"])
@with_server()
async def test_an_exception_while_the_engine_restarts_counts_as_another_death(at: Stage, call: str) -> None:
    await at.join_and_push()
    good, calls = getattr(at.engine, call), 0

    async def bad_once() -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Boom
        return await good()

    setattr(at.engine, call, bad_once)
    at.engine.fail_with = EngineDead("the engine has died")
    await until(lambda: calls == 2)
    await at.learner.join()
    await at.push(1, "next")


class SlowToEnd(HoldingEngine):
    """Samples one completion of a group, and delays the end of the group."""

    async def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        completions, version = await self.sample(prompt_token_ids, sampling)
        yield Sampled(entered_version=version, salt="s", completions=dict(enumerate(completions[:1])))
        try:
            await asyncio.Event().wait()
        finally:
            await self.let_go.wait()


@with_server(make_engine=SlowToEnd)
async def test_a_group_that_ends_slowly_at_its_deadline_affects_nothing_else(at: Stage) -> None:
    await at.join_and_push()
    await at.learner.generate("slow", [1], deadline_s=0.01)
    await asyncio.sleep(0.3)  # many checks after the deadline
    assert not containment._reports
    at.engine.let_go.set()  # type: ignore[attr-defined]
    assert (await at.learner.receive(GroupFailed)).code == "deadline"


def test_a_socket_that_fails_repeatedly_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.server.MAX_RECEIVE_FAILURES", 5)

    async def run() -> None:
        with contextlib.closing(ServerChannel("tcp://127.0.0.1:*")) as channel:
            channel.receive = raising  # type: ignore[method-assign]
            with pytest.raises(ExceptionGroup) as caught:
                await Server(channel, HoldingEngine(), MODEL, ServerConfig()).serve()
            assert caught.group_contains(Boom)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_exceptions_at_one_place_are_logged_with_a_traceback_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one() -> None:
        with containment.log_unexpected("testing"):
            raising()

    for _ in range(3):
        one()
    with containment.log_unexpected("testing"):
        raise ValueError("another line")
    first, other = caplog.records
    assert first.message.startswith("unexpected Boom while testing") and first.exc_info and first.exc_info[0] is Boom
    assert "ValueError" in other.message
    monkeypatch.setattr(containment, "REPORT_INTERVAL_S", 0.0)
    one()
    assert "2 more since the last report" in caplog.records[-1].message


def test_the_engines_death_and_a_cancellation_are_not_contained() -> None:
    async def run() -> None:
        async def die() -> None:
            raise EngineDead("the engine has died")

        with pytest.raises(EngineDead):
            await containment.run_contained(die(), "testing")
        waiting = asyncio.create_task(containment.run_contained(asyncio.Event().wait(), "testing"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
