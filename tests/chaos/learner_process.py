"""The learner as the user starts it, with traps at its states and a copy of what the audit needs.

Beside the run it keeps in the chaos directory: `weights/<version>-<digest>.safetensors` of every version before it is pushed,
and `received/<group>-<time>` of every group before it is committed.
"""

import faulthandler
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

import learner.servers.epoch
import learner.storage.retention
import learner.storage.writer
import protocol.collective.group
from learner.__main__ import main
from learner.leader import Leader
from learner.rollouts.ledger import Ledger
from learner.servers.link import ServerLink
from learner.servers.push import ServerPush
from learner.servers.pusher import Pusher
from learner.storage.run_dir import RunDir
from protocol.channel.sockets import LearnerChannel
from protocol.collective.gloo import GlooCollective
from protocol.weights.buckets import make_manifest
from tests.chaos.traps import Traps

BUCKET_BYTES = 64 << 10
"""In place of learner.push.bucket_mib, whose smallest is more than the tiny model: here it has several."""
WEIGHTS, RECEIVED = "weights", "received"


def run(chaos_dir: Path, arguments: list[str]) -> None:
    """`learner train` with traps; does not return."""
    faulthandler.register(signal.SIGUSR1)
    traps = Traps(chaos_dir, "learner")
    traps.tell("started")
    _set_traps(traps)
    _keep_books(traps)
    sys.argv = ["learner", "train", *arguments]
    main()


def _set_traps(traps: Traps) -> None:
    traps.wrap(Ledger, "rewind", "starting")
    traps.wrap(Leader, "connect", "resuming")
    traps.wrap(RunDir, "begin", "beginning")
    traps.wrap(Ledger, "admit", "admitting")
    traps.wrap(Ledger, "receive", "before receive is committed")
    traps.wrap(ServerLink, "acknowledge", "between commit and ack")
    traps.wrap(Ledger, "score", "before score is committed")
    traps.wrap(Ledger, "consume", "before step is committed")
    traps.wrap(ServerLink, "begin_push", "before ready")
    traps.wrap(learner.servers.epoch.Epoch, "join", "joining")
    traps.wrap(ServerPush, "_result", "before done")
    traps.wrap(learner.storage.writer, "make_durable", "checkpoint written, not renamed")
    traps.wrap(learner.storage.retention, "prune", "checkpoint renamed")
    traps.wrap(LearnerChannel, "receive", "moment")

    class TrappedCollective(GlooCollective):
        def __init__(self, *args: Any) -> None:
            traps.reach("forming")
            super().__init__(*args)

        def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
            traps.reach("mid-bucket")
            if traps.is_sprung("flip"):
                tensor = tensor.clone()
                tensor.view(torch.uint8)[0] ^= 4
            return super().start_broadcast(tensor)

    protocol.collective.group.GlooCollective = TrappedCollective  # type: ignore[misc]
    learner.servers.epoch.make_manifest = lambda tensors, dtype, _, wire: make_manifest(
        tensors, dtype, BUCKET_BYTES, wire
    )


def _keep_books(traps: Traps) -> None:
    directory = traps.directory
    push, receive, consume = Pusher._push_until_done, Ledger.receive, Ledger.consume

    def keep_weights(pusher: Pusher, version: int, tensors: Callable[[], Any], *members: Any) -> Any:
        content = save({name: tensor.detach().contiguous().clone() for name, tensor in tensors()})
        digest = hashlib.sha256(content).hexdigest()[:12]
        _write_whole(directory / WEIGHTS / f"{version}-{digest}.safetensors", content)
        return push(pusher, version, tensors, *members)

    def keep_received(ledger: Ledger, group_id: str, payload: bytes, *args: Any) -> bool:
        _write_whole(directory / RECEIVED / f"{group_id}-{time.monotonic_ns()}", payload)
        is_new = receive(ledger, group_id, payload, *args)
        traps.tell("received")
        return is_new

    def tell_consumed(ledger: Ledger, groups: Any, step: int) -> None:
        consume(ledger, groups, step)
        traps.tell("consumed", step)

    Pusher._push_until_done = keep_weights  # type: ignore[method-assign]
    Ledger.receive, Ledger.consume = keep_received, tell_consumed  # type: ignore[method-assign]
    Leader.connect = _told_before(Leader.connect, traps)  # type: ignore[method-assign]
    ServerLink._connected = _Connected(traps)  # type: ignore[assignment]


def _told_before(function: Callable[..., None], traps: Traps) -> Callable[..., None]:
    def call(*args: Any) -> None:
        traps.tell("up")
        function(*args)

    return call


class _Connected:
    """In place of the link's attribute: tells when the server is lost and when it is found."""

    def __init__(self, traps: Traps) -> None:
        self._traps, self._value = traps, False

    def __get__(self, link: ServerLink, _: type) -> bool:
        return self._value

    def __set__(self, link: ServerLink, value: bool) -> None:
        if value != self._value:
            self._traps.tell("server found" if value else "server lost")
        self._value = value


def _write_whole(path: Path, content: bytes) -> None:
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(content)
        aside.rename(path)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
