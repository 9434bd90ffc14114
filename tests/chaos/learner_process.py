"""The learner as the user starts it, with traps at its states and a copy of what the audit needs.

Beside the run it keeps in the chaos directory: `weights/<version>-<digest>.safetensors` of every version before it is pushed,
`received/<group>-<time>` of every group before it is committed, and `answered/<time>` of an evaluation before its answers are forgotten.
What it tells of a server has its port for a number, and what it tells of an episode the process that played it.
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
import learner.servers.sync_session
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
"""In place of learner.weight_sync.bucket_mib, whose smallest is more than the tiny model: here it has several."""
WEIGHTS, RECEIVED = "weights", "received"
SLOW_STEP_S = 1.0
"""While nobody waits for steps."""
LOOK_EVERY_S = 0.02
REREAD_EVERY_S = 0.5
"""In place of the fleet's 5 s: an absence from the list lasts 0.3 to 4 s."""


def run(chaos_dir: Path, arguments: list[str]) -> None:
    """`learner train` with traps; does not return."""
    faulthandler.register(signal.SIGUSR1)
    os.environ[CHAOS_DIR] = str(chaos_dir)
    traps = Traps(chaos_dir, "learner")
    traps.tell("started")
    _set_traps(traps)
    _keep_books(traps)
    _keep_pace(slow_of(chaos_dir))
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
    learner.servers.sync_session.make_manifest = lambda tensors, dtype, _, wire: make_manifest(
        tensors, dtype, BUCKET_BYTES, wire
    )


def _name_flips_by_session() -> dict[str, list[str]]:
    """Return the names of the traps that flip a byte in a session, one for each of its servers; filled as sessions begin."""
    session_of, flips = SyncSessions.of, dict[str, list[str]]()

    def of_and_name(sessions: SyncSessions, *args: Any) -> SyncSession:
        session = session_of(sessions, *args)
        flips[session.name] = [flip_of(_port_of(member.endpoint)) for member in session.members]
        return session

    SyncSessions.of = of_and_name  # type: ignore[method-assign]
    return flips


def _port_of(endpoint: str) -> int:
    return int(split_endpoint(endpoint)[1])


def _keep_books(traps: Traps) -> None:
    directory = traps.directory
    push, receive, consume, forget = WeightSync._push_until_done, Ledger.receive, Ledger.consume, PartialResults.forget

    def keep_weights(pusher: WeightSync, version: int, tensors: Callable[[], Any], *members: Any) -> Any:
        content = save({name: tensor.detach().contiguous().clone() for name, tensor in tensors()})
        digest = hashlib.sha256(content).hexdigest()[:12]
        _write_whole(directory / WEIGHTS / f"{version}-{digest}.safetensors", content)
        return push(pusher, version, tensors, *members)

    def keep_received(ledger: Ledger, groups: Iterable[GroupPayload]) -> list[str]:
        groups = list(groups)
        for group in groups:
            _write_whole(directory / RECEIVED / f"{group.group_id}-{time.monotonic_ns()}", group.payload)
        are_new = receive(ledger, groups)
        traps.tell("received")
        return are_new

    def tell_consumed(ledger: Ledger, groups: Any, step: int) -> None:
        consume(ledger, groups, step)
        traps.tell("consumed", step)

    def keep_answers(kept: PartialResults) -> None:
        lines = directory / "run" / background.FILE
        if lines.is_file():
            _write_whole(directory / ANSWERED / f"{time.time_ns()}", lines.read_bytes())
        forget(kept)

    WeightSync._push_until_done = keep_weights  # type: ignore[method-assign]
    Ledger.receive, Ledger.consume = keep_received, tell_consumed  # type: ignore[method-assign]
    PartialResults.forget = keep_answers  # type: ignore[method-assign]
    Controller.connect = _told_before(Controller.connect, traps)  # type: ignore[method-assign]
    ServerLink._connected = _Connected(traps)  # type: ignore[assignment]
    Fleet._note = _told_states(Fleet._note, traps)  # type: ignore[method-assign]
    learner.servers.fleet.REREAD_EVERY_S = REREAD_EVERY_S
    _tell_ends(traps)


def _keep_pace(slow: Path) -> None:
    """A step takes SLOW_STEP_S while nobody waits for one."""
    next_batch = Controller.next_batch

    def wait_and_take(controller: Controller, *args: Any) -> Any:
        goes_on_at = time.monotonic() + SLOW_STEP_S
        while slow.exists() and time.monotonic() < goes_on_at:
            time.sleep(LOOK_EVERY_S)
        return next_batch(controller, *args)

    Controller.next_batch = wait_and_take  # type: ignore[method-assign]


def _tell_ends(traps: Traps) -> None:
    """How each episode ended that an environment or an agent has played. Each has a task of its own, and so values of its own here."""
    group_id, pid = ContextVar[str]("group_id"), ContextVar[int]("pid")

    def noting_group(play: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def note_and_play(player: Player | AgentPlayer, played: str, *args: Any, **options: Any) -> Any:
            group_id.set(played)
            return await play(player, played, *args, **options)

        return note_and_play

    def telling_end(episode: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def play_and_tell(*args: Any) -> Any:
            played = await episode(*args)
            traps.tell(f"{ENDED}{played.state}", pid.get(), group_id.get())
            return played

        return play_and_tell

    for player in (Player, AgentPlayer):
        player.play = noting_group(player.play)  # type: ignore[method-assign]
        player._episode = telling_end(player._episode)  # type: ignore[method-assign]
    ask, order = Lease.ask, AgentProcess.play

    async def ask_and_note(lease: Lease, *args: Any) -> Any:
        pid.set(lease.process.pid)
        return await ask(lease, *args)

    async def order_and_note(process: AgentProcess, *args: Any) -> Any:
        pid.set(process.pid)
        return await order(process, *args)

    Lease.ask, AgentProcess.play = ask_and_note, order_and_note  # type: ignore[method-assign]


def _told_before(function: Callable[..., None], traps: Traps) -> Callable[..., None]:
    def call(*args: Any) -> None:
        traps.tell("up")
        function(*args)

    return call


def _told_states(note: Callable[[Fleet, Member], None], traps: Traps) -> Callable[[Fleet, Member], None]:
    def note_and_tell(fleet: Fleet, member: Member) -> None:
        before = member.noted_state
        note(fleet, member)
        if member.noted_state != before:
            traps.tell(f"server {member.noted_state}", _port_of(member.endpoint))

    return note_and_tell


class _Connected:
    """In place of the link's attribute: tells when the server is lost and when it is found."""

    def __init__(self, traps: Traps) -> None:
        self._traps, self._name = traps, "is connected, as told"

    def __get__(self, link: ServerLink, _: type) -> bool:
        return bool(link.__dict__.get(self._name, False))

    def __set__(self, link: ServerLink, value: bool) -> None:
        if value != self.__get__(link, ServerLink):
            self._traps.tell("server found" if value else "server lost", _port_of(link.endpoint))
        link.__dict__[self._name] = value


def _write_whole(path: Path, content: bytes) -> None:
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(content)
        aside.rename(path)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
