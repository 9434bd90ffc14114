"""`inference-server` with traps at its states, started by a campaign.

vLLM spawns its processes, which import this module again; so a worker can be made to hang too.
"""

import faulthandler
import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from inference_server import server
from inference_server.__main__ import main
from inference_server.engine.interface import Engine, PushOrder
from inference_server.engine.supervisor import EngineSupervisor
from inference_server.requests import Groups
from inference_server.weight_update import WeightUpdates
from protocol.channel.sockets import ServerChannel
from tests.chaos.traps import Traps

CHAOS_DIR = "SLIPSTREAM_TEST_CHAOS_DIR"
FOREVER_S = 3600.0


def run(chaos_dir: Path, arguments: list[str]) -> None:
    """Serve until killed."""
    os.environ[CHAOS_DIR] = str(chaos_dir)
    set_traps(chaos_dir, calls=("pause",))
    sys.argv = ["inference-server", *arguments]
    main()


def set_worker_traps(chaos_dir: Path) -> None:
    """Set the trap of a vLLM process: the call that loads a push."""
    from inference_server.engine.weight_receiver import Receiver

    traps, successor = Traps(chaos_dir, "engine"), Receiver.successor

    def hang_or_call(receiver: Receiver, order: PushOrder) -> Any:
        if traps.is_sprung("load_push"):
            time.sleep(FOREVER_S)
        return successor(receiver, order)

    Receiver.successor = hang_or_call  # type: ignore[method-assign]


def set_traps(chaos_dir: Path, calls: tuple[str, ...]) -> None:
    """Wrap the product's functions in the server's process. `calls`: calls of the engine that can hang here."""
    faulthandler.register(signal.SIGUSR1)
    traps = Traps(chaos_dir, "server")
    traps.record("started")
    for owner, name, state in (
        (server.Server, "serve", "starting"),
        (server.Server, "_greet", "greeting"),
        (Groups, "_generate", "generating"),
        (Groups, "_send", "delivering"),
        (WeightUpdates, "_pause", "pausing"),
        (WeightUpdates, "_receive", "receiving"),
        (WeightUpdates, "_load", "loading"),
        (WeightUpdates, "_resume", "resuming"),
        (ServerChannel, "receive", "moment"),
    ):
        traps.wrap(owner, name, state)
    _record_events(traps)
    _make_hang(Traps(chaos_dir, "engine"), calls)


def _make_hang(traps: Traps, calls: tuple[str, ...]) -> None:
    init = server.Server.__init__

    @functools.wraps(init)
    def init_with_traps(self: server.Server, channel: ServerChannel, engine: Engine, *args: Any) -> None:
        for call in calls:
            traps.make_hang(engine, call)
        init(self, channel, engine, *args)

    server.Server.__init__ = init_with_traps  # type: ignore[method-assign]


def _record_events(traps: Traps) -> None:
    serve, deliver, drop_session = server.Server.serve, server.Server._deliver, WeightUpdates._drop_session
    restart = EngineSupervisor._restart

    @functools.wraps(serve)
    async def record_up(self: server.Server, *args: Any) -> None:
        traps.record("up")
        await serve(self, *args)

    @functools.wraps(restart)
    async def record_engine_up(self: EngineSupervisor) -> None:
        await restart(self)
        traps.record("engine up")

    @functools.wraps(deliver)
    async def record_lost(self: server.Server, message: Any) -> bool:
        had_learner = self._tenancy.holder is not None
        is_delivered = await deliver(self, message)
        if had_learner and not is_delivered:
            traps.record("learner lost")
        return is_delivered

    @functools.wraps(drop_session)
    async def reach_torn(self: WeightUpdates, *args: Any, **options: Any) -> Any:
        outcome = await drop_session(self, *args, **options)
        if self.state == "torn":
            traps.reach("torn")
        return outcome

    server.Server.serve, server.Server._deliver = record_up, record_lost  # type: ignore[method-assign]
    EngineSupervisor._restart = record_engine_up  # type: ignore[method-assign]
    WeightUpdates._drop_session = reach_torn  # type: ignore[method-assign]


if __name__ == "__mp_main__":
    set_worker_traps(Path(os.environ[CHAOS_DIR]))
if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
