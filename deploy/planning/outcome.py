"""The result of a simulated run, in the terms of a real run's metrics.jsonl.

    servers.py, simulation.py ─▶ Sums after the warm-up and at the end ─▶ Outcome of the steps between

Pure.
"""

import msgspec


class Sums(msgspec.Struct, kw_only=True):
    """Sums since the start of the run. Server quantities are summed over all servers."""

    time_s: float = 0.0
    steps: int = 0
    wait_s: float = 0.0
    """Seconds that the learner waited for batches."""
    weight_sync_s: float = 0.0
    """Seconds that the learner waited for weight syncs."""
    tokens: float = 0.0
    """Tokens trained on."""
    groups: int = 0
    """Groups trained on."""
    staleness: int = 0
    """Staleness summed over the groups trained on."""
    idle_s: float = 0.0
    """Server seconds without a group."""
    stalled_s: float = 0.0
    """Server seconds paused while the server had groups."""
    sequence_s: float = 0.0
    """Number of running sequences, integrated over time."""
    group_s: float = 0.0
    """Number of groups requested and not done, integrated over time."""
    groups_done: int = 0
    latency_s: float = 0.0
    """Seconds from request to last token, summed over `groups_done`."""

    def since(self, before: "Sums") -> "Sums":
        return Sums(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Averages over the steps after the warm-up."""

    num_servers: int
    num_ranks: int
    samples_per_s: float
    tokens_per_s: float
    step_s: float
    learner_idle_frac: float
    """Share of the time waiting for a batch: perf/learner_idle_frac."""
    learner_weight_sync_frac: float
    """Share of the time waiting for a weight sync."""
    server_idle_frac: float
    """Share of the time without a group: perf/server_idle_frac."""
    server_stalled_frac: float
    """Share of the time paused for a weight sync while the server had groups."""
    server_fill_frac: float
    """Running sequences as a share of the capacity."""
    staleness_mean: float
    staleness_max: int
    groups_in_flight: float
    """Mean number of groups requested and not done."""
    group_latency_s: float
    """Mean seconds from request to last token."""
