"""The simulated servers together: which gets a group, their pushes, their deaths.

    simulation.py ─▶ send ─▶ the server with the fewest groups (server.py) ─▶ on_done
                     pause, resume: around a push

Invariant: a group is with one server, or held until one is there, or done.
"""

import heapq
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import numpy as np
import simpy

from deploy.planning.outcome import Sums
from deploy.planning.rates import Rates
from deploy.planning.server import Group, Server

Events = Generator[simpy.Event, Any, None]

NOTICED_S = 3.0
"""After which the learner knows that a server is dead."""


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Of every server, independently."""

    every_s: float
    """Mean time from its start to its end."""
    restart_s: float
    """Until it is there again, without weights."""


class Fleet:
    """Of servers that are alike."""

    def __init__(
        self, env: simpy.Environment, rates: Rates, num_servers: int, capacity: int, on_done: Callable[[Group], None]
    ) -> None:
        self._env, self._rates = env, rates
        self._servers = [Server(env, rates, capacity, on_done) for _ in range(num_servers)]
        self._chosen_at = [0] * num_servers
        self._choices = itertools.count(1)
        self._held: list[Group] = []
        """Asked for while no server is there."""
        self._version = 0
        self.num_places = num_servers * capacity

    @property
    def num_groups(self) -> int:
        """Asked for and not done."""
        return len(self._held) + sum(len(server.groups) for server in self._servers)

    def send(self, groups: Sequence[Group]) -> None:
        """Each to the server with the fewest, of several such to the one that was chosen longest ago."""
        ready = [
            (len(server.groups), self._chosen_at[i], i) for i, server in enumerate(self._servers) if server.is_ready
        ]
        if not ready:
            self._held += groups
            return
        heapq.heapify(ready)
        by_server: dict[int, list[Group]] = {}
        for group in groups:
            num_groups, _, i = ready[0]
            self._chosen_at[i] = next(self._choices)
            by_server.setdefault(i, []).append(group)
            heapq.heapreplace(ready, (num_groups + 1, self._chosen_at[i], i))
        for i, of_server in by_server.items():
            self._servers[i].submit(of_server)

    def pause(self) -> None:
        for server in self._servers:
            server.pause()

    def resume(self, version: int) -> None:
        """All have `version` now."""
        self._version = version
        for server in self._servers:
            server.resume(version)

    def begin_failures(self, failures: Failures, rng: np.random.Generator) -> None:
        for server in self._servers:
            self._env.process(self._fail(server, failures, rng))

    def add_to(self, sums: Sums) -> None:
        """The seconds of all servers up to now."""
        for server in self._servers:
            server.catch_up()
        for name in ("idle_s", "stalled_s", "sequence_s", "group_s"):
            setattr(sums, name, sum(getattr(server, name) for server in self._servers))

    def _fail(self, server: Server, failures: Failures, rng: np.random.Generator) -> Events:
        while True:
            yield self._env.timeout(rng.exponential(failures.every_s))
            lost = server.die()
            yield self._env.timeout(NOTICED_S)
            self.send(lost)
            yield self._env.timeout(failures.restart_s + self._rates.push_seconds(1))
            server.join(self._version)
            held, self._held = self._held, []
            self.send(held)
