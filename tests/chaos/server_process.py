"""`inference-server` with traps at its states."""

import faulthandler
import functools
import signal
import sys
from pathlib import Path
from typing import Any

from inference_server import push, server
from inference_server.__main__ import main
from inference_server.engine.life import EngineLife
from inference_server.groups import Groups
from protocol.channel.sockets import ServerChannel
from tests.chaos.traps import Traps


def run(chaos_dir: Path, arguments: list[str]) -> None:
    """Serve until killed."""
    set_traps(chaos_dir)
    sys.argv = ["inference-server", *arguments]
    main()


def set_traps(chaos_dir: Path) -> None:
    """Wrap the product's functions, in the process that is to serve."""
    faulthandler.register(signal.SIGUSR1)
    traps = Traps(chaos_dir, "server")
    traps.tell("started")
    for owner, name, state in (
        (server.Server, "serve", "starting"),
        (server.Server, "_greet", "greeting"),
        (Groups, "_generate", "generating"),
        (Groups, "_send", "delivering"),
        (push.Pushes, "_pause", "pausing"),
        (push.Pushes, "_receive", "receiving"),
        (push.Pushes, "_load", "loading"),
        (push.Pushes, "_resume", "resuming"),
        (ServerChannel, "receive", "moment"),
    ):
        traps.wrap(owner, name, state)
    _tell(traps)


def _tell(traps: Traps) -> None:
    serve, deliver, give_up = server.Server.serve, server.Server._deliver, push.Pushes._give_up
    restart = EngineLife._restart

    @functools.wraps(serve)
    async def tell_up(self: server.Server) -> None:
        traps.tell("up")
        await serve(self)

    @functools.wraps(restart)
    async def tell_engine_up(self: EngineLife) -> None:
        await restart(self)
        traps.tell("engine up")

    @functools.wraps(deliver)
    async def tell_lost(self: server.Server, message: Any) -> bool:
        had_learner = self._learner is not None
        is_delivered = await deliver(self, message)
        if had_learner and not is_delivered:
            traps.tell("learner lost")
        return is_delivered

    @functools.wraps(give_up)
    async def reach_torn(self: push.Pushes, *args: Any) -> Any:
        outcome = await give_up(self, *args)
        if self.state == "torn":
            traps.reach("torn")
        return outcome

    server.Server.serve, server.Server._deliver = tell_up, tell_lost  # type: ignore[method-assign]
    EngineLife._restart = tell_engine_up  # type: ignore[method-assign]
    push.Pushes._give_up = reach_torn  # type: ignore[method-assign]


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
