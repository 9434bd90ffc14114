"""What a simulated run comes to: sums over its time, and from two of them the numbers that a real run has in its metrics.jsonl.

servers.py, simulation.py ─▶ Sums at the end of the warm-up and at the end ─▶ Outcome of the steps between. Pure.
"""

import msgspec


class Sums(msgspec.Struct, kw_only=True):
    """Since the beginning; those of servers over all of them."""

    time_s: float = 0.0
    steps: int = 0
    wait_s: float = 0.0
    """Of the learner, for batches."""
    push_s: float = 0.0
    """Of the learner, for pushes."""
    tokens: float = 0.0
    """Trained on."""
    groups: int = 0
    """Trained on."""
    staleness: int = 0
    """Over those groups."""
    idle_s: float = 0.0
    """Of servers without a group."""
    stalled_s: float = 0.0
    """Of servers with groups, paused."""
    sequence_s: float = 0.0
    """Running sequences over time."""
    group_s: float = 0.0
    """Groups asked for and not done, over time."""
    groups_done: int = 0
    latency_s: float = 0.0
    """Over those: from the request to the last token."""

    def since(self, before: "Sums") -> "Sums":
        return Sums(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of the steady steps."""

    num_servers: int
    num_ranks: int
    samples_per_s: float
    tokens_per_s: float
    step_s: float
    learner_idle_frac: float
    """Of the time, waiting for a batch: perf/learner_idle_frac."""
    learner_push_frac: float
    """Of the time, waiting for a push."""
    server_idle_frac: float
    """Of the time, without a group: perf/server_idle_frac."""
    server_stalled_frac: float
    """Of the time, paused for a push with groups to work on."""
    server_fill_frac: float
    """Running sequences per place for one."""
    staleness_mean: float
    staleness_max: int
    groups_in_flight: float
    """Asked for and not done, on average."""
    group_latency_s: float
    """From the request to the last token, on average."""
