"""An engine that dies, stalls and restarts: a scripted engine, real sockets."""

import asyncio
import contextlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from inference_server.config import ServerConfig
from inference_server.engine import processes as engine_processes
from inference_server.engine.interface import EngineDead
from inference_server.engine.processes import EngineProcesses
from inference_server.engine.supervisor import EngineSupervisor, StallDetector
from protocol.messages import (
    Ack,
    Group,
    GroupFailed,
    Manifest,
    Pulse,
    PushAbort,
    PushBegin,
    PushDone,
    PushFailed,
    PushReady,
    Score,
    Scores,
    TensorSpec,
    Welcome,
)
from tests.fakes import ScriptedEngine, report
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import NOBODY, Stage, begin, run_with_server, until, with_server

DEAD = EngineDead("the engine has died")
SCORE = Score(request_id="s", token_ids=np.array([1, 2], np.int32), deadline_s=5)

pytestmark = pytest.mark.usefixtures("look_often")


async def new_server_id(learner: ScriptedLearner, old: str) -> str:
    """Wait for a pulse with a new server id."""
    while (pulse := await learner.receive(Pulse)).server_id == old:
        pass
    assert pulse.policy_version is None
    return pulse.server_id


async def die(at: Stage, num_restarts: int) -> None:
    """Wait until the engine has restarted for the n-th time."""
    at.engine.fail_with = DEAD
    await until(lambda: at.status()["engine_restarts"] == num_restarts)


@with_server()
async def test_a_dead_engine_is_replaced_finished_groups_are_kept_and_running_ones_can_be_requested_again(
    at: Stage,
) -> None:
    first_id = (await at.learner.join()).server_id
    await at.push(version=3)
    await at.learner.group("finished", [1])
    await at.hold_group("running")
    at.engine.release_restart.clear()
    at.engine.fail_with = DEAD
    second_id = await new_server_id(at.learner, first_id)
    status = at.status()
    assert at.engine.cancelled == 1 and (status["groups_running"], status["groups_unacked"]) == (0, 1)
    assert "the engine is restarting" in status["unavailable"]

    # Until the next engine is ready, acks count and other messages get no answer.
    await at.learner.send(Ack(group_ids=["finished"]))
    await at.learner.generate("running", [1])
    await at.learner.send(SCORE)
    await at.learner.send(begin(1, "e2"))
    await at.learner.hello()
    await until(lambda: at.status()["groups_unacked"] == 0)
    with pytest.raises(TimeoutError):  # a failure would cost an attempt
        await at.learner.receive((Welcome, Group, GroupFailed, Scores, PushDone), timeout_s=0.3)
    at.engine.release_restart.set()
    await until(lambda: at.status()["engine_restarts"] == 1)
    assert "neither old nor new weights" in at.status()["unavailable"]
    welcome = await at.learner.join()
    assert (welcome.server_id, welcome.policy_version) == (second_id, None)

    await at.push(version=4, session="e3")
    at.engine.release.set()
    again = await at.learner.group("running", [1])
    assert (again.group_id, again.completions[0].versions) == ("running", [(4, 1)])
    assert (at.status()["unavailable"], at.status()["push_state"]) == (None, "idle")


@with_server()
async def test_an_engine_without_pushed_weights_is_available_after_a_restart(at: Stage) -> None:
    await at.learner.join()
    await die(at, 1)
    await until(lambda: at.status()["unavailable"] is None)
    assert (await at.learner.join()).is_untouched


def test_work_cancelled_before_its_start_is_closed() -> None:
    async def work() -> None:
        raise AssertionError("it began")

    async def run() -> None:
        coroutine = work()
        async with asyncio.TaskGroup() as tasks:
            EngineSupervisor(ScriptedEngine(), tasks, 0, lambda: None, lambda: asyncio.sleep(0)).spawn(
                coroutine, "work"
            ).cancel()
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED

    asyncio.run(run())


@pytest.mark.parametrize("dies_in", ["generate", "score", "pause", "idleness"])
@with_server()
async def test_a_death_is_noticed_at_every_call(at: Stage, monkeypatch: pytest.MonkeyPatch, dies_in: str) -> None:
    if dies_in != "idleness":
        monkeypatch.setattr(ScriptedEngine, "check_alive", lambda engine: None)
    first_id = (await at.learner.join()).server_id
    await at.push()
    at.engine.fail_with = DEAD
    match dies_in:
        case "generate":
            await at.learner.generate("g", [1])
        case "score":
            await at.learner.send(SCORE)
        case "pause":
            await at.learner.send(PushBegin(session="e1", version=1))
    await new_server_id(at.learner, first_id)
    await until(lambda: at.status()["engine_restarts"] == 1)
    assert not any(isinstance(message, (Scores, GroupFailed)) for message in at.learner.unread)
    failures = [message for message in at.learner.unread if isinstance(message, PushFailed)]
    assert [DEAD.args[0] in failed.message for failed in failures] == ([True] if dies_in == "pause" else [])


@pytest.mark.parametrize("call", ["pause", "load_push", "set_version", "resume", "leave_session"])
@with_server(config=ServerConfig(pause_timeout_s=0.2))
async def test_a_call_that_times_out_is_the_death_of_the_engine_and_the_next_push_goes_to_the_next_engine(
    at: Stage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("inference_server.weight_update.SLACK_S", 0.1)

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    first_id = (await at.learner.join()).server_id
    await at.push(version=3)
    at.engine.release_restart.clear()
    with monkeypatch.context() as patch:
        patch.setattr(at.engine, call, hang)
        if call == "load_push":
            spec = TensorSpec(name="weight", shape=(1,), dtype="float32")
            manifest = Manifest(
                tensors=(spec,) * 10_000, bucket_bytes=1
            )  # 10,000 deadlines, if the push were not given up
            quick = msgspec.structs.replace(NOBODY, timeout_s=0.1)
            await at.learner.send(PushBegin(session="f", version=4, rendezvous=quick, manifest=manifest))
            await at.learner.receive(PushReady)
            await at.learner.send(PushAbort(session="f"))
            await at.learner.send(PushBegin(session="g", version=4))
            await at.learner.hello()
        elif call == "leave_session":
            await at.learner.send(PushAbort(session="e1"))
        else:
            at.engine.scripted_reports.append([report()])
            await at.learner.send(PushBegin(session="e1", version=4))
        await until(lambda: at.status()["unavailable"] is not None)
    knob = "learner.weight_sync.timeout_s" if call == "load_push" else "server.pause_timeout_s"
    reason = at.status()["unavailable"]
    assert "is restarting: the engine did not answer within 0.2 s while" in reason and knob in reason
    if call != "leave_session":
        failed = await at.learner.receive(PushFailed)
        assert knob in failed.message and not failed.weights_intact
        assert failed.state in ("pausing", "receiving", "resuming")
    assert not any(isinstance(message, Welcome) for message in at.learner.unread), "no engine to push to"
    at.engine.release_restart.set()
    await new_server_id(at.learner, first_id)
    await until(lambda: at.status()["engine_restarts"] == 1)
    await at.learner.join()
    await at.push(version=4, session="h")
    assert (await at.learner.group("g", [1])).completions[0].versions == [(4, 1)]
    status = at.status()
    assert (status["pushes_done"], status["pushes_failed"]) == (2, int(call != "leave_session"))


@with_server(config=ServerConfig(stall_timeout_s=0.5))
async def test_an_engine_that_stalls_with_groups_restarts_unless_generation_is_paused(
    at: Stage,
) -> None:
    first_id = (await at.learner.join()).server_id
    await at.push(version=3)
    at.engine.release.clear()
    await at.fail_push(4, "e1", state="loading", weights_intact=False, error="torn")
    await at.learner.generate("g", [1])
    await asyncio.sleep(1.0)  # twice the timeout
    status = at.status()
    assert (status["groups_running"], status["engine_restarts"]) == (1, 0)
    at.engine.release_restart.clear()
    await at.push(version=4, session="f")
    await until(lambda: at.status()["unavailable"] is not None)
    reason = at.status()["unavailable"]
    assert "the engine sampled no token for 0.5 s (server.stall_timeout_s) with 1 request running" in reason
    at.engine.release_restart.set()
    await new_server_id(at.learner, first_id)
    assert at.engine.cancelled == 1


@with_server(config=ServerConfig(stall_timeout_s=0.5))
async def test_an_engine_that_stalls_with_a_score_restarts(at: Stage) -> None:
    """The server of a frozen reference has no groups."""
    first_id = (await at.learner.join()).server_id
    at.engine.release.clear()
    at.engine.release_restart.clear()
    await at.learner.send(Score(request_id="s", token_ids=np.array([1, 2], np.int32), deadline_s=60.0))
    await until(lambda: at.status()["unavailable"] is not None)
    assert "(server.stall_timeout_s) with 1 request running" in at.status()["unavailable"]
    at.engine.release_restart.set()
    await new_server_id(at.learner, first_id)


@with_server()
async def test_a_learner_that_abandoned_a_push_is_welcomed_again_after_its_end(at: Stage) -> None:
    first_id = (await at.learner.join()).server_id
    at.engine.release_pause.clear()
    at.engine.scripted_reports.append([report()])
    await at.learner.send(begin(0, "a"))
    await until(lambda: at.engine.calls == ["pause"])
    await at.learner.send(PushAbort(session="a"))
    await at.learner.hello()
    with pytest.raises(TimeoutError):
        await at.learner.receive(Welcome, timeout_s=0.3)
    at.engine.release_pause.set()
    await until(lambda: at.engine.calls[-1] == "leave_session a")
    assert (await at.learner.join()).server_id == first_id


@with_server()
async def test_a_push_ends_with_its_engine(at: Stage) -> None:
    first_id = (await at.learner.join()).server_id
    at.engine.release_pause.clear()
    await at.learner.send(begin(0, "a"))
    await until(lambda: at.engine.calls == ["pause"])
    at.engine.fail_with = DEAD
    await new_server_id(at.learner, first_id)
    at.engine.release_pause.set()
    await at.learner.join()
    await at.push(version=0, session="b")
    status = at.status()
    assert (status["pushes_failed"], status["pushes_done"], status["push_state"]) == (1, 1, "idle")
    assert at.engine.calls.count("load_push") == 1, "the push of the first engine must not continue in the second"


@pytest.mark.parametrize(("max_restarts", "restart_fails"), [(0, False), (2, False), (2, True)])
def test_one_death_too_many_ends_the_server_with_the_reason_and_the_key(max_restarts: int, restart_fails: bool) -> None:
    async def test(at: Stage) -> None:
        at.engine.restart_fails = restart_fails
        for num_deaths in range(1, 1 + (0 if restart_fails else max_restarts)):
            await die(at, num_deaths)
        at.engine.fail_with = DEAD
        reason = "could not be restarted: out of memory" if restart_fails else "the engine has died"
        too_many = rf"death {max_restarts + 1} of the engine within.*server\.max_engine_restarts"
        with pytest.raises(EngineDead, match=f"{reason}.*{too_many}"):
            await at.running.task
        assert at.engine.calls.count("restart") == max_restarts

    run_with_server(test, config=ServerConfig(max_engine_restarts=max_restarts))


@with_server(config=ServerConfig(max_engine_restarts=1))
async def test_old_deaths_do_not_count(at: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.engine.supervisor.RESTARTS_WINDOW_S", 0.0)
    for num_deaths in (1, 2, 3):
        await die(at, num_deaths)


# --- processes ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sleeping_processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_dead_worker_is_noticed_before_it_is_reaped_and_the_others_are_killed() -> None:
    with sleeping_processes() as (first, second):
        watched = EngineProcesses([first.pid, second.pid, first.pid])
        assert not watched.one_has_ended
        first.kill()
        while not watched.one_has_ended:
            pass
        assert first.returncode is None and second.poll() is None
        watched.kill()
        assert second.wait(timeout=0) != 0
        assert not watched.one_has_ended, "ended processes are no longer watched"


def test_a_process_that_cannot_be_killed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "END_TIMEOUT_S", 0.05)
    monkeypatch.setattr("signal.pidfd_send_signal", lambda descriptor, number: None)
    with sleeping_processes() as processes, pytest.raises(EngineDead, match="still running"):
        EngineProcesses(process.pid for process in processes).kill()


# --- stalls of single replicas ----------------------------------------------------------------------------------------


class Watched:
    """A watch with the test's clock and step counts."""

    def __init__(self, *num_steps: int | None) -> None:
        self.now = 0.0
        self.engine: Any = SimpleNamespace(num_steps=list(num_steps))
        self._watch = StallDetector(self.engine, lambda: self.now, timeout_s=10)

    def check(self, after_s: float, *num_steps: int | None, num_groups: int = 1) -> None:
        self.now += after_s
        self.engine.num_steps = list(num_steps)
        self._watch.check(num_groups)


def test_an_idle_replica_with_requests_is_a_stall_although_the_other_continues() -> None:
    watched = Watched(0, 0)
    watched.check(0, 1, 5)
    watched.check(9, 2, 5)
    with pytest.raises(
        EngineDead, match=r"replica 1, which has requests, sampled no token for 10 s .* with 1 request running"
    ):
        watched.check(2, 3, 5)


def test_a_replica_without_requests_never_stalls() -> None:
    watched = Watched(0, 0)
    watched.check(0, 1, 5)
    for step in range(2, 9):
        watched.check(9, step, None)
    watched.check(9, 9, 5)  # its first request in a minute has just arrived
    with pytest.raises(EngineDead):
        watched.check(11, 10, 5)


def test_an_engine_without_groups_never_stalls() -> None:
    watched = Watched(0)
    for _ in range(3):
        watched.check(60, 0, num_groups=0)
    watched.check(9, 0)
    with pytest.raises(
        EngineDead, match=r"the engine sampled no token for 10 s \(server.stall_timeout_s\) with 1 request running"
    ):
        watched.check(2, 0)
