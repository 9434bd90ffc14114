"""A fleet of scripted servers, started and closed as by the controller."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from protocol.config import DEFAULT_ENDPOINT
from protocol.messages import PROTOCOL_VERSION, Hello
from tests.fakes import ServerThread
from tests.fingerprint import MODEL
from tests.learner.runs import make_run


@contextmanager
def a_fleet(
    tmp_path: Path, *endpoints: str, listed: Path | None = None, name: str = "r", **learner: Any
) -> Iterator[Fleet]:
    """`listed`: file of the endpoints; `name`: name of the run."""
    run = make_run(tmp_path, *endpoints, **{"connect_timeout_s": 1.0} | learner)
    if listed is not None:
        run = msgspec.structs.replace(run, endpoint=DEFAULT_ENDPOINT, endpoints_from=f"file:{listed}")
    hello = Hello(run=name, protocol_version=PROTOCOL_VERSION, model=MODEL, learner=f"learner of {name}")
    fleet = Fleet(run, hello, LoopThread("test"))
    fleet.start(lambda member, group: None)
    try:
        yield fleet
        fleet.leave()
    finally:
        fleet.loop.stop()
        fleet.close()


def tenancy_of(server: ServerThread) -> dict[str, Any]:
    return server.running.server.status()["tenancy"]
