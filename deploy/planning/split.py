"""The best division of GPUs between servers and ranks, by simulating as few of them as will do.

    GPUs ─▶ splits ─▶ those that could be best, the most promising first ─▶ simulate ─▶ Outcomes, the best first

What one side could do if it never waited bounds what both do together; so once a split has been simulated, those whose bound is
lower need not be. Invariant: none that is left out could have been better, but for splits between those of the grid.
"""

from collections.abc import Callable, Iterable

import msgspec

from deploy.planning.outcome import Outcome
from deploy.planning.simulation import Setup
from protocol.errors import ConfigError

MOST_SPLITS = 64
"""Of so many GPUs, at even distances."""
AS_GOOD = 0.99
"""Of the most samples/s; among splits as good as that the one with the least staleness is best."""


class Split(msgspec.Struct, frozen=True):
    """Servers and ranks."""

    num_servers: int
    num_ranks: int


def splits(num_gpus: int, gpus_per_server: int) -> list[Split]:
    """Every GPU used: what servers leave over are ranks. Raises ConfigError where there is not one for each side."""
    most = (num_gpus - 1) // gpus_per_server
    if most < 1:
        raise ConfigError(
            f"--gpus {num_gpus}: a server takes {gpus_per_server} (server.tensor_parallel_size times server.data_parallel_size) "
            f"and the learner at least one, so {gpus_per_server + 1} or more are needed"
        )
    num = min(most, MOST_SPLITS)
    counts = sorted({1 + round(i * (most - 1) / max(1, num - 1)) for i in range(num)})
    return [Split(count, num_gpus - count * gpus_per_server) for count in counts]


def most_samples_per_s(setup: Setup) -> float:
    """What the slower side could do if it never waited for the other."""
    rates, config = setup.rates, setup.learner
    samples, capacity = config.groups_per_step * config.sampling.num_completions, setup.server.capacity
    mean_length = rates.lengths.mean
    stall_s = rates.stall_seconds(setup.num_servers, receive_overlap=setup.server.receive_overlap)
    servers_s = stall_s + samples * mean_length * rates.decode_s(capacity) / capacity / setup.num_servers
    train_s = rates.train_s(samples * mean_length, 0.0, setup.num_ranks)
    push_s = rates.push_seconds(setup.num_servers)
    learner_s = max(train_s, push_s) if config.push.overlap else train_s + push_s
    return samples / max(servers_s, learner_s)


def search(candidates: Iterable[Setup], simulate: Callable[[Setup], Outcome]) -> list[Outcome]:
    """Simulate those of the candidates that could be best; return what they come to, the best first."""
    most, outcomes = 0.0, []
    for bound, setup in sorted(((most_samples_per_s(each), each) for each in candidates), key=lambda each: -each[0]):
        if bound < AS_GOOD * most:
            break
        outcomes.append(simulate(setup))
        most = max(most, outcomes[-1].samples_per_s)
    return sorted(outcomes, key=lambda each: _order(each, most))


def _order(outcome: Outcome, most: float) -> tuple[float, float]:
    """Those as good as the best by their staleness, before all others."""
    is_as_good = outcome.samples_per_s >= AS_GOOD * most
    return (0.0, outcome.staleness_mean) if is_as_good else (1.0, -outcome.samples_per_s)
