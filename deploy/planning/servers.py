"""The simulated servers: assignment of groups, decoding speed, pauses for a weight sync, failures.

    simulation.py ─▶ send ─▶ server with the fewest groups: waiting ─▶ running (up to `capacity`) ─▶ on_done
                     pause, resume: around a weight sync

Every running sequence gets one token per decoding step, so a server's progress is one number of steps.
A sequence ends once progress has grown by its length. This needs one event per sequence, none per token.

Invariants: a group is on one server, held until a server is up, lost until the failure is noticed, or done.
Every change of the pace first brings the progress up to date.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import simpy

from deploy.planning.outcome import Sums
from deploy.planning.rates import Rates
from protocol.errors import ConfigError

ROUNDING = 1e-9
Events = Generator[simpy.Event, Any, None]
NOTICED_S = 3.0
"""Time until the learner notices that a server is dead."""
MAX_VAIN_FAILURES = 1000
"""Failures per server without a completed group, after which a simulation would hardly ever end."""


class SimulatedGroup:
    """A group on its way from its slot to its batch."""

    __slots__ = ("lengths", "num_left", "oldest_version", "requested_at", "slot")

    def __init__(self, slot: int, lengths: list[float], requested_at: float) -> None:
        self.slot, self.lengths, self.requested_at = slot, lengths, requested_at
        self.restart()

    def restart(self) -> None:
        """Discard all sampled tokens."""
        self.num_left, self.oldest_version = len(self.lengths), -1


class SimulatedServer:
    """A simulated inference server."""

    def __init__(
        self, env: simpy.Environment, rates: Rates, capacity: int, on_done: Callable[[SimulatedGroup], None]
    ) -> None:
        self.groups: dict[int, SimulatedGroup] = {}
        """Running and waiting groups, by slot."""
        self.is_ready = True
        """True while the server is up and has weights, so that it may receive groups."""
        self.idle_s = self.stalled_s = self.sequence_s = self.group_s = 0.0
        """Accumulated seconds, as in `Sums`."""
        self._env, self._rates, self._capacity, self._on_done = env, rates, capacity, on_done
        self._version = 0
        self._progress, self._at = 0.0, env.now
        self._running: list[tuple[float, int, SimulatedGroup]] = []
        """Heap of (progress at which the sequence ends, slot, group)."""
        self._waiting: deque[tuple[float, SimulatedGroup]] = deque()
        self._is_paused = False
        self._alarm = 0
        """Number of the only valid alarm; earlier alarms are out of date."""

    def submit(self, groups: Iterable[SimulatedGroup]) -> None:
        self.catch_up()
        for group in groups:
            self.groups[group.slot] = group
            self._waiting.extend((length, group) for length in group.lengths)
        self._advance()

    def pause(self) -> None:
        self.catch_up()
        self._is_paused = True
        self._advance()

    def resume(self, version: int) -> None:
        """Continue with new weights."""
        self.catch_up()
        self._is_paused, self._version = False, version
        self._advance()

    def die(self) -> list[SimulatedGroup]:
        """Stop and return the unfinished groups, which restart elsewhere."""
        self.catch_up()
        lost = list(self.groups.values())
        for group in lost:
            group.restart()
        self.groups.clear()
        self._running.clear()
        self._waiting.clear()
        self.is_ready = False
        self._advance()
        return lost

    def join(self, version: int) -> None:
        """Return to service with weights, but stay paused during a weight sync."""
        self.catch_up()
        self.is_ready, self._version = True, version
        self._advance()

    def catch_up(self) -> None:
        """Bring progress and accumulated seconds up to the present."""
        elapsed_s, self._at = self._env.now - self._at, self._env.now
        self.group_s += elapsed_s * len(self.groups)
        if not self.groups:
            self.idle_s += elapsed_s
        elif self._is_paused:
            self.stalled_s += elapsed_s
        elif num_running := len(self._running):
            self.sequence_s += elapsed_s * num_running
            self._progress += elapsed_s / self._rates.decode_s(num_running)

    def _advance(self) -> None:
        """Fill the free capacity and set the alarm for the next sequence to end."""
        self._alarm += 1
        if self._is_paused:
            return
        running, waiting = self._running, self._waiting
        while waiting and len(running) < self._capacity:
            length, group = waiting.popleft()
            if group.oldest_version < 0:
                group.oldest_version = self._version
            heapq.heappush(running, (self._progress + length, group.slot, group))
        if running:
            steps = max(0.0, running[0][0] - self._progress)
            alarm = self._env.timeout(steps * self._rates.decode_s(len(running)), self._alarm)
            alarm.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm.value != self._alarm:
            return
        self.catch_up()
        running = self._running
        self._progress = max(self._progress, running[0][0])
        done = []
        while running and running[0][0] <= self._progress + ROUNDING:
            group = heapq.heappop(running)[2]
            group.num_left -= 1
            if group.num_left == 0:
                done.append(self.groups.pop(group.slot))
        self._advance()
        for group in done:
            self._on_done(group)


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Random failures, independent for each server."""

    every_s: float
    """Mean time from a server's start to its failure."""
    restart_s: float
    """Time until a failed server is up again, without weights."""


class SimulatedFleet:
    """A fleet of identical servers."""

    def __init__(
        self,
        env: simpy.Environment,
        rates: Rates,
        num_servers: int,
        capacity: int,
        on_done: Callable[[SimulatedGroup], None],
    ) -> None:
        self._env, self._rates = env, rates
        self._num_vain = 0
        """Number of failures since the last group was done."""

        def done(group: SimulatedGroup) -> None:
            self._num_vain = 0
            on_done(group)

        self._servers = [SimulatedServer(env, rates, capacity, done) for _ in range(num_servers)]
        self._chosen_at = [0] * num_servers
        self._choices = itertools.count(1)
        self._held: list[SimulatedGroup] = []
        """Groups requested while no server was up."""
        self._version = 0
        self.num_slots = num_servers * capacity

    @property
    def num_groups(self) -> int:
        """Number of groups requested and not done."""
        return len(self._held) + sum(len(server.groups) for server in self._servers)

    def send(self, groups: Sequence[SimulatedGroup]) -> None:
        """Send each group to the server with the fewest groups.

        A tie goes to the least recently chosen server.
        """
        ready = [
            (len(server.groups), self._chosen_at[i], i) for i, server in enumerate(self._servers) if server.is_ready
        ]
        if not ready:
            self._held += groups
            return
        heapq.heapify(ready)
        by_server: dict[int, list[SimulatedGroup]] = {}
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
        """Resume every server with the weights of `version`."""
        self._version = version
        for server in self._servers:
            server.resume(version)

    def start_failures(self, failures: Failures, rng: np.random.Generator) -> None:
        for server in self._servers:
            self._env.process(self._fail(server, failures, rng))

    def add_to(self, sums: Sums) -> None:
        """Write the seconds of all servers up to now into `sums`."""
        for server in self._servers:
            server.catch_up()
        for name in ("idle_s", "stalled_s", "sequence_s", "group_s"):
            setattr(sums, name, sum(getattr(server, name) for server in self._servers))

    def _fail(self, server: SimulatedServer, failures: Failures, rng: np.random.Generator) -> Events:
        while True:
            yield self._env.timeout(rng.exponential(failures.every_s))
            lost = server.die()
            self._num_vain += 1
            if self._num_vain > MAX_VAIN_FAILURES * len(self._servers):
                raise ConfigError(
                    f"--failures {failures.every_s:g} {failures.restart_s:g}: the servers fail before they complete a "
                    "group; raise EVERY_S"
                )
            yield self._env.timeout(NOTICED_S)
            self.send(lost)
            yield self._env.timeout(failures.restart_s + self._rates.weight_sync_seconds(1))
            server.join(self._version)
            held, self._held = self._held, []
            self.send(held)
