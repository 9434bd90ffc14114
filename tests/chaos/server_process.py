"""`inference-server` with traps at its states.

vLLM's processes are spawned and import this module again, so a worker can be made to hang too.
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
    """The same in a process of vLLM's: the call that loads a push."""
    from inference_server.engine.weight_receiver import Receiver

    traps, successor = Traps(chaos_dir, "engine"), Receiver.successor

    def hang_or_call(receiver: Receiver, order: PushOrder) -> Any:
        if traps.is_sprung("load_push"):
            time.sleep(FOREVER_S)
        return successor(receiver, order)

    Receiver.successor = hang_or_call  # type: ignore[method-assign]


def set_traps(chaos_dir: Path, calls: tuple[str, ...]) -> None:
    """Wrap the product's functions, in the process that is to serve; `calls`: of the engine, that can hang here."""
    faulthandler.register(signal.SIGUSR1)
    traps = Traps(chaos_dir, "server")
    traps.tell("started")
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
    _tell(traps)
    _make_hang(Traps(chaos_dir, "engine"), calls)


def _make_hang(traps: Traps, calls: tuple[str, ...]) -> None:
    init = server.Server.__init__

    @functools.wraps(init)
    def init_with_traps(self: server.Server, channel: ServerChannel, engine: Engine, *args: Any) -> None:
        for call in calls:
            traps.make_hang(engine, call)
        init(self, channel, engine, *args)

    server.Server.__init__ = init_with_traps  # type: ignore[method-assign]


def _tell(traps: Traps) -> None:
    serve, deliver, give_up = server.Server.serve, server.Server._deliver, WeightUpdates._drop_session
    restart = EngineSupervisor._restart

    @functools.wraps(serve)
    async def tell_up(self: server.Server, *args: Any) -> None:
        traps.tell("up")
        await serve(self, *args)

    @functools.wraps(restart)
    async def tell_engine_up(self: EngineSupervisor) -> None:
        await restart(self)
        traps.tell("engine up")

    @functools.wraps(deliver)
    async def tell_lost(self: server.Server, message: Any) -> bool:
        had_learner = self._tenancy.holder is not None
        is_delivered = await deliver(self, message)
        if had_learner and not is_delivered:
            traps.tell("learner lost")
        return is_delivered

    @functools.wraps(give_up)
    async def reach_torn(self: WeightUpdates, *args: Any, **options: Any) -> Any:
        outcome = await give_up(self, *args, **options)
        if self.state == "torn":
            traps.reach("torn")
        return outcome

    server.Server.serve, server.Server._deliver = tell_up, tell_lost  # type: ignore[method-assign]
    EngineSupervisor._restart = tell_engine_up  # type: ignore[method-assign]
    WeightUpdates._drop_session = reach_torn  # type: ignore[method-assign]


if __name__ == "__mp_main__":
    set_worker_traps(Path(os.environ[CHAOS_DIR]))
if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
