"""The learner, started as a user does, with traps at its states and copies of what the audits need.

The chaos directory receives `weights/<version>-<digest>.safetensors` of every version before its push,
`received/<group>-<time>` of every group before its commit, and `answered/<time>` of every evaluation before it discards
its answers. The number of an event is the port for a server, and the process id for an episode.
"""

import faulthandler
import hashlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

import learner.evaluation.results
import learner.servers.fleet
import learner.servers.sync_source
import learner.storage.retention
import learner.storage.writer
import protocol.transports.tcp
from learner.__main__ import main
from learner.controller import Controller
from learner.environments.player import Player
from learner.environments.process import Lease
from learner.evaluation import background
from learner.evaluation.background import PartialResults
from learner.gateway.players import AgentPlayer, AgentProcess
from learner.gateway.session import Session
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger_storage import GroupPayload
from learner.servers.fleet import Fleet
from learner.servers.link import ServerLink
from learner.servers.membership import Member
from learner.servers.reference_server import ReferenceServer
from learner.servers.sync_session import SyncSession, SyncSessions
from learner.servers.weight_sync import WeightSync
from learner.servers.weight_transfer import SyncAttempt
from learner.storage.run_dir import RunDir
from protocol.channel.sockets import LearnerChannel
from protocol.endpoint import split_endpoint
from protocol.transports.collective import RankContext
from protocol.transports.tcp import TcpCollective
from protocol.weights.buckets import make_manifest
from tests.chaos.environment import CHAOS_DIR
from tests.chaos.episodes import ENDED
from tests.chaos.evaluations import ANSWERED
from tests.chaos.traps import Traps, flip_of, slow_of

BUCKET_BYTES = 64 << 10
"""Replaces learner.weight_sync.bucket_mib, whose minimum exceeds the tiny model, so that the model has several
buckets."""
WEIGHTS, RECEIVED = "weights", "received"
SLOW_STEP_S = 1.0
"""Duration of a step while the supervisor does not wait for steps."""
POLL_S = 0.02
REREAD_EVERY_S = 0.5
"""Replaces the fleet's 5 s, because an absence from the list lasts 0.3 to 4 s."""


def run(chaos_dir: Path, arguments: list[str]) -> None:
    """Run `learner train` with traps. Does not return."""
    faulthandler.register(signal.SIGUSR1)
    os.environ[CHAOS_DIR] = str(chaos_dir)
    traps = Traps(chaos_dir, "learner")
    traps.record("started")
    _set_traps(traps)
    _record_run(traps)
    _limit_pace(slow_of(chaos_dir))
    sys.argv = ["learner", "train", *arguments]
    main()


def _set_traps(traps: Traps) -> None:
    traps.wrap(Ledger, "rewind", "starting")
    traps.wrap(Controller, "connect", "resuming")
    traps.wrap(RunDir, "begin", "beginning")
    traps.wrap(Ledger, "admit", "admitting")
    traps.wrap(Ledger, "receive", "before receive is committed")
    traps.wrap(ServerLink, "acknowledge", "between commit and ack")
    traps.wrap(Ledger, "score", "before score is committed")
    traps.wrap(Ledger, "consume", "before step is committed")
    traps.wrap(ReferenceServer, "score", "scoring for the reference")
    traps.wrap(ReferenceServer, "_send", "refilling the reference")
    traps.wrap(Player, "_turn", "between turns")
    traps.wrap(PartialResults, "add", "before an answer is kept")
    traps.wrap(learner.evaluation.results, "record_evaluation", "before evaluation is noted")
    traps.wrap(PartialResults, "forget", "before answers are forgotten")
    traps.wrap(Session, "turn", "between turns")
    traps.wrap(ServerLink, "begin_push", "before ready")
    traps.wrap(SyncSession, "join", "joining")
    traps.wrap(SyncAttempt, "_finish", "before done")
    traps.wrap(learner.storage.writer, "make_durable", "checkpoint written, not renamed")
    traps.wrap(learner.storage.retention, "prune", "checkpoint renamed")
    traps.wrap(LearnerChannel, "receive", "moment")

    flips = _name_flips_by_session()

    class TrappedCollective(TcpCollective):
        def __init__(self, context: RankContext) -> None:
            self._flips = flips[context.session]
            traps.reach("forming")
            super().__init__(context)

        def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
            traps.reach("mid-bucket")
            sprung = [traps.is_sprung(flip) for flip in self._flips]
            if any(sprung):
                tensor = tensor.clone()
                tensor.view(torch.uint8)[0] ^= 4
            return super().start_broadcast(tensor)

    protocol.transports.tcp.TcpCollective = TrappedCollective  # type: ignore[misc]
    learner.servers.sync_source.make_manifest = lambda tensors, dtype, _, wire, adapter: make_manifest(
        tensors, dtype, BUCKET_BYTES, wire, adapter
    )


def _name_flips_by_session() -> dict[str, list[str]]:
    """Return the traps that flip a byte, one for each server of a session. New sessions are added as they begin."""
    session_of, flips = SyncSessions.of, dict[str, list[str]]()

    def of_and_name(sessions: SyncSessions, *args: Any) -> SyncSession:
        session = session_of(sessions, *args)
        flips[session.name] = [flip_of(_port_of(member.endpoint)) for member in session.members]
        return session

    SyncSessions.of = of_and_name  # type: ignore[method-assign]
    return flips


def _port_of(endpoint: str) -> int:
    return int(split_endpoint(endpoint)[1])


def _record_run(traps: Traps) -> None:
    """Copy weights, groups and answers for the audits, and record events."""
    directory = traps.directory
    send, receive, consume, forget = WeightSync._send_until_done, Ledger.receive, Ledger.consume, PartialResults.forget

    def keep_weights(weight_sync: WeightSync, version: int, tensors: Callable[[], Any], *members: Any) -> Any:
        content = save({name: tensor.detach().contiguous().clone() for name, tensor in tensors(adapter_alone=False)})
        digest = hashlib.sha256(content).hexdigest()[:12]
        _write_whole(directory / WEIGHTS / f"{version}-{digest}.safetensors", content)
        return send(weight_sync, version, tensors, *members)

    def keep_received(ledger: Ledger, groups: Iterable[GroupPayload]) -> list[str]:
        groups = list(groups)
        for group in groups:
            _write_whole(directory / RECEIVED / f"{group.group_id}-{time.monotonic_ns()}", group.payload)
        are_new = receive(ledger, groups)
        traps.record("received")
        return are_new

    def record_consumed(ledger: Ledger, groups: Any, step: int) -> None:
        consume(ledger, groups, step)
        traps.record("consumed", step)

    def keep_answers(kept: PartialResults) -> None:
        lines = directory / "run" / background.FILE
        if lines.is_file():
            _write_whole(directory / ANSWERED / f"{time.time_ns()}", lines.read_bytes())
        forget(kept)

    WeightSync._send_until_done = keep_weights  # type: ignore[method-assign]
    Ledger.receive, Ledger.consume = keep_received, record_consumed  # type: ignore[method-assign]
    PartialResults.forget = keep_answers  # type: ignore[method-assign]
    Controller.connect = _record_up_before(Controller.connect, traps)  # type: ignore[method-assign]
    ServerLink._connected = _ConnectionRecorder(traps)  # type: ignore[assignment]
    Fleet._report_state = _record_states(Fleet._report_state, traps)  # type: ignore[method-assign]
    learner.servers.fleet.REREAD_EVERY_S = REREAD_EVERY_S
    _record_ends(traps)


def _limit_pace(slow: Path) -> None:
    """Make a step take SLOW_STEP_S while the file `slow` exists."""
    next_batch = Controller.next_batch

    def wait_and_take(controller: Controller, *args: Any) -> Any:
        until_s = time.monotonic() + SLOW_STEP_S
        while slow.exists() and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return next_batch(controller, *args)

    Controller.next_batch = wait_and_take  # type: ignore[method-assign]


def _record_ends(traps: Traps) -> None:
    """Record how each episode ended. Each episode runs in its own task, and so has its own context variables."""
    group_id, pid = ContextVar[str]("group_id"), ContextVar[int]("pid")

    def with_group(play: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def set_and_play(player: Player | AgentPlayer, group: str, *args: Any, **options: Any) -> Any:
            group_id.set(group)
            return await play(player, group, *args, **options)

        return set_and_play

    def with_end(episode: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def play_and_record(*args: Any) -> Any:
            played = await episode(*args)
            traps.record(f"{ENDED}{played.state}", pid.get(), group_id.get())
            return played

        return play_and_record

    for player in (Player, AgentPlayer):
        player.play = with_group(player.play)  # type: ignore[method-assign]
        player._episode = with_end(player._episode)  # type: ignore[method-assign]
    ask, play = Lease.ask, AgentProcess.play

    async def set_pid_and_ask(lease: Lease, *args: Any) -> Any:
        pid.set(lease.process.pid)
        return await ask(lease, *args)

    async def set_pid_and_play(process: AgentProcess, *args: Any) -> Any:
        pid.set(process.pid)
        return await play(process, *args)

    Lease.ask, AgentProcess.play = set_pid_and_ask, set_pid_and_play  # type: ignore[method-assign]


def _record_up_before(function: Callable[..., None], traps: Traps) -> Callable[..., None]:
    def call(*args: Any) -> None:
        traps.record("up")
        function(*args)

    return call


def _record_states(note: Callable[[Fleet, Member], None], traps: Traps) -> Callable[[Fleet, Member], None]:
    def note_and_record(fleet: Fleet, member: Member) -> None:
        before = member.noted_state
        note(fleet, member)
        if member.noted_state != before:
            traps.record(f"server {member.noted_state}", _port_of(member.endpoint))

    return note_and_record


class _ConnectionRecorder:
    """Replaces the link's attribute. Records when the server is lost and found."""

    def __init__(self, traps: Traps) -> None:
        self._traps, self._name = traps, "recorded connection"

    def __get__(self, link: ServerLink, _: type) -> bool:
        return bool(link.__dict__.get(self._name, False))

    def __set__(self, link: ServerLink, value: bool) -> None:
        if value != self.__get__(link, ServerLink):
            self._traps.record("server found" if value else "server lost", _port_of(link.endpoint))
        link.__dict__[self._name] = value


def _write_whole(path: Path, content: bytes) -> None:
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(content)
        aside.rename(path)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
