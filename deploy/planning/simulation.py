"""Discrete-event simulation of a run of n servers and m ranks, and the search for the best split.

    take ─▶ train ─▶ weight sync ─▶ take …   a finished sync publishes its version, which admits new groups
    servers.py: groups ─▶ done ─▶ scored ─▶ ready, taken only in slot order, as in rollouts/slot_order.py

The real run's own code decides how many groups to request (`num_slots_allowed`, and `AutoStaleness` for "auto").
If there are more than `most_servers`, fewer servers represent them, each with its share of the groups.
A weight sync still counts all servers.
Invariant: every slot is taken once, in order, and no staler than the bound, which only that code enforces.
Equal seeds give equal runs, and equal completions for any n and m.

`search` finds the best division of GPUs between servers and ranks with few simulations.
"""

import math
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec
import numpy as np
import simpy

from deploy.planning.outcome import Outcome, Sums
from deploy.planning.rates import Rates
from deploy.planning.servers import Events, Failures, SimulatedFleet, SimulatedGroup
from inference_server.config import ServerConfig
from learner.config import LearnerConfig
from learner.rollouts.slot_order import AutoStaleness, num_slots_allowed
from protocol.errors import ConfigError

MOST_SERVERS = 256
WARM_UP_SHARE = 0.25
MOST_SPLITS = 64
"""Maximum number of splits to consider, evenly spaced."""
AS_GOOD = 0.99
"""Share of the highest samples/s. Among splits at or above it, the one with the least staleness is best."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of one simulation."""

    learner: LearnerConfig
    server: ServerConfig
    rates: Rates
    num_servers: int
    num_ranks: int
    failures: Failures | None = None


def simulate(setup: Setup, *, steps: int, seed: int = 0, most_servers: int = MOST_SERVERS) -> Outcome:
    """Simulate `steps` optimizer steps and leave the first quarter out of the outcome."""
    run = Simulation(setup, seed, most_servers)
    before = run.after(max(1, math.ceil(steps * WARM_UP_SHARE)))
    run.staleness_max = 0
    return run.outcome(run.after(steps).since(before))


def representatives(groups_per_step: int, num_servers: int, most_servers: int) -> tuple[int, int]:
    """Return the numbers of groups per step and servers that represent the real ones."""
    if num_servers <= most_servers:
        return groups_per_step, num_servers
    num_groups = max(1, round(groups_per_step * most_servers / num_servers))
    return num_groups, max(1, round(num_servers * num_groups / groups_per_step))


class Simulation:
    """The simulated learner and the slots of its groups."""

    def __init__(self, setup: Setup, seed: int, most_servers: int) -> None:
        self._setup, self._rates, config = setup, setup.rates, setup.learner
        self._groups_per_step, self._num_servers = representatives(
            config.groups_per_step, setup.num_servers, most_servers
        )
        self._weight = config.groups_per_step / self._groups_per_step
        """Number of real groups that each simulated group represents."""
        self._num_completions = config.sampling.group_size
        self._env = simpy.Environment()
        self._lengths = setup.rates.lengths.sampler()
        self._rng = np.random.default_rng(seed)
        capacity = setup.server.capacity
        self._fleet = SimulatedFleet(self._env, setup.rates, self._num_servers, capacity, self._done)
        if setup.failures is not None:
            self._fleet.start_failures(setup.failures, self._rng.spawn(1)[0])
        self._auto_staleness = AutoStaleness(config)
        self._next_to_admit = self._next_to_take = 0
        self._ready: dict[int, SimulatedGroup] = {}
        self._num_missing = 0
        """Number of groups still missing from the batch that the learner waits for."""
        self._complete = self._env.event()
        self._push: simpy.Process | None = None
        self._taken_at = 0.0
        self._sums = Sums()
        self.staleness_max = 0
        self._publish(0)

    def after(self, steps: int) -> Sums:
        """Run until `steps` steps are done and return the sums so far."""
        while self._sums.steps < steps:
            self._env.run(self._env.process(self._step(self._sums.steps)))
        self._sums.time_s = self._env.now
        self._fleet.add_to(self._sums)
        return msgspec.structs.replace(self._sums)

    def outcome(self, sums: Sums) -> Outcome:
        """Scale the sums up to the whole run."""
        time_s, server_s = sums.time_s, sums.time_s * self._num_servers
        capacity = self._setup.server.capacity
        return Outcome(
            num_servers=self._setup.num_servers,
            num_ranks=self._setup.num_ranks,
            samples_per_s=self._weight * sums.groups * self._num_completions / time_s,
            tokens_per_s=self._weight * sums.tokens / time_s,
            step_s=time_s / sums.steps,
            learner_idle_frac=sums.wait_s / time_s,
            learner_weight_sync_frac=sums.weight_sync_s / time_s,
            server_idle_frac=sums.idle_s / server_s,
            server_stalled_frac=sums.stalled_s / server_s,
            server_fill_frac=sums.sequence_s / server_s / capacity,
            staleness_mean=sums.staleness / sums.groups,
            staleness_max=self.staleness_max,
            groups_in_flight=self._weight * sums.group_s / time_s,
            group_latency_s=sums.latency_s / max(sums.groups_done, 1),
        )

    def _step(self, version: int) -> Events:
        env, sums = self._env, self._sums
        began = env.now
        groups = yield from self._take(version)
        sums.wait_s += env.now - began
        lengths = [length for group in groups for length in group.lengths]
        yield env.timeout(self._rates.train_s(self._weight * sum(lengths), max(lengths), self._setup.num_ranks))
        trained = env.now
        if self._push is not None:
            yield self._push
        self._push = env.process(self._push_weights(version + 1))
        if not self._setup.learner.weight_sync.overlap_with_training:
            yield self._push
        sums.weight_sync_s += env.now - trained
        sums.tokens += sum(lengths)
        sums.groups += len(groups)
        sums.steps += 1

    def _take(self, version: int) -> Generator[simpy.Event, Any, list[SimulatedGroup]]:
        """Wait for the groups of the next slots and return them."""
        began = self._env.now
        slots = range(self._next_to_take, self._next_to_take + self._groups_per_step)
        self._num_missing = sum(slot not in self._ready for slot in slots)
        if self._num_missing:
            self._complete = self._env.event()
            yield self._complete
        self._next_to_take = slots.stop
        groups = [self._ready.pop(slot) for slot in slots]
        stalenesses = [version - group.oldest_version for group in groups]
        self._sums.staleness += sum(stalenesses)
        self.staleness_max = max(self.staleness_max, *stalenesses)
        self._record_taken(self._env.now - began)
        return groups

    def _record_taken(self, waited_s: float) -> None:
        step_s, self._taken_at = self._env.now - self._taken_at, self._env.now
        next_slots = range(self._next_to_take, self._next_to_take + self._groups_per_step)
        self._auto_staleness.update(
            waited_share=waited_s / step_s if step_s > 0 else 0.0,
            has_room=self._fleet.num_groups * self._num_completions < self._fleet.num_slots,
            has_spare=all(slot in self._ready for slot in next_slots),
        )

    def _push_weights(self, version: int) -> Events:
        num_servers = self._setup.num_servers
        stall_s = self._rates.stall_seconds(
            num_servers, overlap_weight_loading=self._setup.server.overlap_weight_loading
        )
        yield self._env.timeout(self._rates.weight_sync_seconds(num_servers) - stall_s)
        self._fleet.pause()
        yield self._env.timeout(stall_s)
        self._fleet.resume(version)
        self._publish(version)

    def _publish(self, version: int) -> None:
        """Publish a version and request all groups that the rule now allows.

        The simulated run has no last step.
        """
        num_slots = num_slots_allowed(
            version=version,
            max_staleness=self._auto_staleness.versions,
            groups_per_step=self._groups_per_step,
            total_groups=self._next_to_admit + (1 << 40),
        )
        slots = range(self._next_to_admit, num_slots)
        if not slots:
            return
        self._next_to_admit = slots.stop
        lengths = self._lengths.draw(self._rng, len(slots) * self._num_completions).reshape(len(slots), -1)
        if version == 0:
            lengths = self._out_of_step(lengths)
        self._fleet.send(
            [
                SimulatedGroup(slot, of_slot, self._env.now)
                for slot, of_slot in zip(slots, lengths.tolist(), strict=True)
            ]
        )

    def _out_of_step(self, lengths: np.ndarray) -> np.ndarray:
        """Stagger the ends of the first groups if the servers have no room for all groups.

        Completions of one length that start together would stay in lockstep for the whole run.
        Real completions do not.
        """
        num_at_once = max(1, self._fleet.num_slots // self._num_completions)
        if len(lengths) <= num_at_once:
            return lengths
        left = np.minimum(1.0, (1 + np.arange(len(lengths))) / num_at_once)
        return np.maximum(1.0, np.rint(lengths * left[:, None]))

    def _done(self, group: SimulatedGroup) -> None:
        self._sums.groups_done += 1
        self._sums.latency_s += self._env.now - group.requested_at
        scored = self._env.timeout(self._rates.score_s, group)
        scored.callbacks.append(lambda event: self._scored(event.value))

    def _scored(self, group: SimulatedGroup) -> None:
        self._ready[group.slot] = group
        if self._num_missing and group.slot < self._next_to_take + self._groups_per_step:
            self._num_missing -= 1
            if self._num_missing == 0:
                self._complete.succeed()


class Split(msgspec.Struct, frozen=True):
    """Numbers of servers and ranks."""

    num_servers: int
    num_ranks: int


def splits(num_gpus: int, gpus_per_server: int) -> list[Split]:
    """Return splits that use every GPU: ranks get the GPUs that servers leave.

    Raises:
        ConfigError: There are too few GPUs for one server and one rank.
    """
    most = (num_gpus - 1) // gpus_per_server
    if most < 1:
        raise ConfigError(
            f"--gpus {num_gpus}: a server takes {gpus_per_server} (server.tensor_parallel_size times "
            f"server.data_parallel_size) and the learner at least one, so {gpus_per_server + 1} or more are needed"
        )
    num = min(most, MOST_SPLITS)
    counts = sorted({1 + round(i * (most - 1) / max(1, num - 1)) for i in range(num)})
    return [Split(count, num_gpus - count * gpus_per_server) for count in counts]


def most_samples_per_s(setup: Setup) -> float:
    """Return the samples/s of the slower side if it never waited for the other side."""
    rates, config = setup.rates, setup.learner
    samples, capacity = config.groups_per_step * config.sampling.group_size, setup.server.capacity
    mean_length = rates.lengths.mean
    stall_s = rates.stall_seconds(setup.num_servers, overlap_weight_loading=setup.server.overlap_weight_loading)
    servers_s = stall_s + samples * mean_length * rates.decode_s(capacity) / capacity / setup.num_servers
    train_s = rates.train_s(samples * mean_length, 0.0, setup.num_ranks)
    weight_sync_s = rates.weight_sync_seconds(setup.num_servers)
    learner_s = max(train_s, weight_sync_s) if config.weight_sync.overlap_with_training else train_s + weight_sync_s
    return samples / max(servers_s, learner_s)


def search(candidates: Iterable[Setup], simulate: Callable[[Setup], Outcome]) -> list[Outcome]:
    """Simulate the candidates that could be best; return their outcomes, best first."""
    most, outcomes = 0.0, []
    for bound, setup in sorted(((most_samples_per_s(each), each) for each in candidates), key=lambda each: -each[0]):
        if bound < AS_GOOD * most:
            break
        outcomes.append(simulate(setup))
        most = max(most, outcomes[-1].samples_per_s)
    return sorted(outcomes, key=lambda each: _order(each, most))


def _order(outcome: Outcome, most: float) -> tuple[float, float]:
    """Return a sort key that puts near-best outcomes first, in order of staleness."""
    is_as_good = outcome.samples_per_s >= AS_GOOD * most
    return (0.0, outcome.staleness_mean) if is_as_good else (1.0, -outcome.samples_per_s)
