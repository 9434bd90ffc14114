"""A search for the best split of GPUs between servers and ranks, with few simulations.

    GPUs ─▶ splits ─▶ candidates, most promising first ─▶ simulate ─▶ Outcomes, best first

The throughput of either side without waiting is an upper bound for both sides together.
The search skips every split whose bound is below AS_GOOD times the best result so far.
Invariant: no skipped split of the grid could have been better.
"""

from collections.abc import Callable, Iterable

import msgspec

from deploy.planning.outcome import Outcome
from deploy.planning.simulation import Setup
from protocol.errors import ConfigError

MOST_SPLITS = 64
"""Maximum number of splits to consider, evenly spaced."""
AS_GOOD = 0.99
"""Share of the highest samples/s. Among splits at or above it, the one with the least staleness is best."""


class Split(msgspec.Struct, frozen=True):
    """Numbers of servers and ranks."""

    num_servers: int
    num_ranks: int


def splits(num_gpus: int, gpus_per_server: int) -> list[Split]:
    """Return splits that use every GPU: ranks get the GPUs that servers leave.

    Raises:
        ConfigError: If there are too few GPUs for one server and one rank.
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
    push_s = rates.push_seconds(setup.num_servers)
    learner_s = max(train_s, push_s) if config.weight_sync.overlap_with_training else train_s + push_s
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
