"""Rates from a run directory: learner and weight sync from its metrics, decoding from its ledger.

    RUN_DIR/config.toml, metrics.jsonl, ledger.db ─▶ MeasuredRun ─▶ Observed
                                                                 └▶ Rates

No metric has the two decoding rates, because a group's time depends on everything that runs concurrently.
`fit_decoding` therefore replays the ledger's groups on simulated servers, with their queues and pauses.
The rates vary until the simulated seconds fit the real ones.

Invariant: the metrics of both results cover the same steps, all but the first quarter.
"""

import sqlite3
import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import simpy

from deploy.planning.rates import Lengths, Rates
from deploy.planning.servers import SimulatedGroup, SimulatedServer
from deploy.planning.step_metrics import Lines, mean, synced_lines, values
from inference_server.config import ServerConfig, ServerRun
from learner.config import LearnerConfig, LearnerRun
from learner.report.summary import read_metrics
from protocol.config import load_config
from protocol.errors import ConfigError

MOST_SEQUENCES = 4096
"""Maximum number of sequences to replay for each server, from the end of the run. More only take longer."""
NOT_COUNTED_SHARE = 0.2
"""Share of the replayed groups, at the start, that the error ignores.

Groups that ran concurrently with them started before the replay and are missing from it.
"""
STEP_SHARES = (0.0, 0.03, 0.1, 0.25, 0.45, 0.7, 0.9, 1.0)
"""Candidate values for the fixed share of a full engine's decoding step."""
FASTEST = 1e-6
GOLDEN = (5**0.5 - 1) / 2
GOLDEN_STEPS = 16
WARM_UP_SHARE = 0.25
LEAST_STEPS = 8
TOKEN_PHASES = ("time/forward_backward", "time/reference", "time/policy_pass")
"""Phases of a step whose time is proportional to its tokens."""
PROGRAM = "slipstream plan"
ANY_ENDPOINT = "tcp://127.0.0.1:1"
"""Placeholder endpoint for loading the server section. No process connects to it."""
SQL = """SELECT admitted_version, num_tokens, admitted_at, received_at, scored_at FROM groups
WHERE scored_at IS NOT NULL AND received_at > admitted_at ORDER BY admitted_at, slot"""


class LedgerGroup(NamedTuple):
    """A group as the ledger records it."""

    version: int
    num_tokens: int
    admitted_at: float
    received_at: float
    scored_at: float


class Servers(NamedTuple):
    """Servers that sampled the groups."""

    num: int
    capacity: int
    stall_s: float
    """Pause before each new version, in seconds."""


def fit_decoding(
    rates: Rates, groups: Sequence[LedgerGroup], num_completions: int, servers: Servers
) -> tuple[Rates, float]:
    """Fit the decoding rates to the seconds of the groups.

    Returns all rates, and the relative error of the median group's seconds.
    """
    groups = groups[-max(1, MOST_SEQUENCES * servers.num // num_completions) :]
    lengths = lengths_of(groups, rates.lengths, num_completions)
    measured_s = np.array([group.received_at - group.admitted_at for group in groups])
    counted = slice(int(len(groups) * NOT_COUNTED_SHARE), None)
    slowest_s = 4 * float(measured_s.max())

    def errors(full_s: float, share: float) -> np.ndarray:
        tried = with_decoding(rates, full_s, share, servers.capacity)
        return np.abs(np.log(replay(tried, groups, lengths, servers) / measured_s))[counted]

    def mean_error(share: float, full_s: float) -> float:
        return float(errors(full_s, share).mean())

    least, best, median = np.inf, rates, np.inf
    for share in STEP_SHARES:
        full_s = minimum(partial(mean_error, share), slowest_s * FASTEST, slowest_s)
        left = errors(full_s, share)
        if left.mean() < least:
            least, best, median = left.mean(), with_decoding(rates, full_s, share, servers.capacity), np.median(left)
    return best, float(np.expm1(median))


def with_decoding(rates: Rates, full_s: float, share: float, capacity: int) -> Rates:
    """Set the decoding step of a full server to `full_s`, of which `share` is fixed."""
    step_s, token_s = share * full_s, (1 - share) * full_s / capacity
    return msgspec.structs.replace(rates, decode_step_s=step_s, decode_token_s=token_s)


def minimum(error_of: Callable[[float], float], low: float, high: float) -> float:
    """Minimize by golden-section search (Kiefer 1953) on a logarithmic scale."""
    low, high = np.log(low), np.log(high)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = error_of(np.exp(left)), error_of(np.exp(right))
    for _ in range(GOLDEN_STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = error_of(np.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = error_of(np.exp(right))
    return float(np.exp((low + high) / 2))


def lengths_of(groups: Sequence[LedgerGroup], lengths: Lengths, num_completions: int) -> list[list[float]]:
    """Return the lengths of each group's completions.

    The ledger has only their sum, so randomly drawn groups are assigned in the order of their sums.
    """
    drawn = lengths.sampler().draw(np.random.default_rng(0), len(groups) * num_completions).reshape(len(groups), -1)
    drawn = drawn[np.argsort(drawn.sum(1), kind="stable")]
    rank_of_group = np.argsort(np.argsort([group.num_tokens for group in groups], kind="stable"))
    return drawn[rank_of_group].tolist()


def replay(rates: Rates, groups: Sequence[LedgerGroup], lengths: list[list[float]], servers: Servers) -> np.ndarray:
    """Return the seconds that each group would have taken at these rates."""
    env = simpy.Environment(groups[0].admitted_at)
    done_at = np.zeros(len(groups))

    def done(group: SimulatedGroup) -> None:
        done_at[group.slot] = env.now

    fleet = [SimulatedServer(env, rates, servers.capacity, done) for _ in range(servers.num)]

    def until(time: float) -> simpy.Event:
        return env.timeout(max(0.0, time - env.now))

    def request_groups() -> Generator[simpy.Event, Any, None]:
        version = groups[0].version
        for i, group in enumerate(groups):
            if group.version > version:
                version = group.version
                yield until(group.admitted_at - servers.stall_s)
                for server in fleet:
                    server.pause()
                yield until(group.admitted_at)
                for server in fleet:
                    server.resume(version)
            yield until(group.admitted_at)
            least = min(fleet, key=lambda server: len(server.groups))
            least.submit([SimulatedGroup(i, lengths[i], env.now)])

    env.process(request_groups())
    env.run()
    return done_at - np.array([group.admitted_at for group in groups])


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Measured results of a run, under the names of `Outcome`."""

    samples_per_s: float
    step_s: float
    learner_idle_frac: float
    server_idle_frac: float
    """Share of the time without a pending group."""
    staleness_mean: float
    staleness_max: int


def learner_section(arguments: Sequence[str]) -> LearnerConfig:
    """Load the learner's section from a config file and flags. Raises ConfigError."""
    return load_config(LearnerRun, arguments, PROGRAM).in_effect().learner


def server_section(arguments: Sequence[str]) -> ServerConfig:
    """Load the server's section from a config file and flags. Raises ConfigError."""
    return load_config(ServerRun, [*arguments, "--endpoint", ANY_ENDPOINT], PROGRAM).server


class MeasuredRun(NamedTuple):
    """Contents of a run directory."""

    learner: LearnerConfig
    server: ServerConfig
    num_servers: int
    lines: Lines
    """Lines of metrics.jsonl."""
    groups: list[LedgerGroup]


def read_run(run_dir: Path) -> MeasuredRun:
    """Read a run directory.

    Raises:
        ConfigError: It is not a readable run directory, has too few steps, or has no scored group.
        RunDirectoryError: metrics.jsonl is missing, broken or has no step.
    """
    config_file = str(run_dir / "config.toml")
    learner, server = learner_section([config_file]), server_section([config_file])
    uri = f"{(run_dir / 'ledger.db').absolute().as_uri()}?mode=ro"
    try:
        lines = read_metrics(run_dir)
        with closing(sqlite3.connect(uri, uri=True)) as ledger:
            groups = [LedgerGroup(*row) for row in ledger.execute(SQL)]
    except (OSError, ValueError, sqlite3.Error) as error:
        raise ConfigError(
            f"{run_dir} cannot be read as a run directory: {error}; name one with config.toml, metrics.jsonl and "
            "ledger.db"
        ) from error
    if len(lines) < LEAST_STEPS:
        raise ConfigError(
            f"{run_dir} has {len(lines)} steps; at least {LEAST_STEPS} steps are needed to estimate its rates"
        )
    if not groups:
        raise ConfigError(
            f"{run_dir} has no scored group in ledger.db; expected the groups of its {len(lines)} steps. Copy "
            "ledger.db-wal too"
        )
    with_servers = [{"servers/ready": 1} | line for line in lines[_warm_up(lines) :]]
    num_servers = round(statistics.median(values(with_servers, "servers/ready")))
    return MeasuredRun(learner, server, num_servers, lines, groups)


def rates_of(run: MeasuredRun, *, num_ranks: int) -> tuple[Rates, float]:
    """Return the run's rates and the relative error of the median group's seconds.

    Raises:
        ConfigError: A metric is missing, or the quantiles cannot have the mean completion length.
    """
    steady, server = run.lines[_warm_up(run.lines) :], run.server
    rates = Rates(
        lengths=_lengths(steady),
        decode_step_s=0.0,
        decode_token_s=1.0,
        score_s=statistics.median(group.scored_at - group.received_at for group in run.groups),
        **_learner_rates(run, num_ranks),
        **_push_rates(steady, server, run.num_servers),
    )
    stall_s = rates.stall_seconds(run.num_servers, overlap_weight_loading=server.overlap_weight_loading)
    servers = Servers(num=run.num_servers, capacity=server.capacity, stall_s=stall_s)
    return fit_decoding(rates, run.groups, run.learner.sampling.group_size, servers)


def observed(run: MeasuredRun) -> Observed:
    """Return the run's measured results. Raises ConfigError if a metric is missing."""
    lines, first = run.lines, _warm_up(run.lines)
    steady, step_s, times = lines[first:], _step_s(lines), values(lines[first - 1 :], "time")
    return Observed(
        samples_per_s=run.learner.groups_per_step * run.learner.sampling.group_size / step_s,
        step_s=step_s,
        learner_idle_frac=mean(steady, "time/wait_for_batch") / step_s,
        server_idle_frac=idle_frac(run.groups, times[0], times[-1]),
        staleness_mean=mean(steady, "staleness/mean"),
        staleness_max=round(max(values(steady, "staleness/max"))),
    )


def idle_frac(groups: Sequence[LedgerGroup], start: float, end: float) -> float:
    """Return the share of the time without a pending group."""
    busy_s, busy_until = 0.0, start
    for group in groups:  # in the order of their requests
        began, ended = max(group.admitted_at, busy_until), min(group.received_at, end)
        if ended > began:
            busy_s += ended - began
            busy_until = ended
    return 1 - busy_s / (end - start)


def _warm_up(lines: Lines) -> int:
    return max(1, round(len(lines) * WARM_UP_SHARE))


def _step_s(lines: Lines) -> float:
    """Return the mean seconds of a step from end to end, with logging and checkpoints."""
    return mean(lines[_warm_up(lines) :], "time/step")


def _lengths(steady: Lines) -> Lengths:
    prefix = "rollout/completion_length_"
    return Lengths(
        p10=mean(steady, f"{prefix}p10"),
        p50=mean(steady, f"{prefix}p50"),
        p90=mean(steady, f"{prefix}p90"),
        mean=mean(steady, f"{prefix}mean"),
        max=max(values(steady, f"{prefix}max")),
        truncated_frac=mean(steady, "rollout/truncated_frac"),
    )


def _learner_rates(run: MeasuredRun, num_ranks: int) -> dict[str, float]:
    steady = run.lines[_warm_up(run.lines) :]
    token_s = sum(mean(steady, phase) for phase in TOKEN_PHASES if phase in steady[-1])
    weight_sync_s = (
        0.0 if run.learner.weight_sync.overlap_with_training else mean(synced_lines(steady), "weight_sync/seconds")
    )
    rest_s = _step_s(run.lines) - mean(steady, "time/wait_for_batch") - token_s - weight_sync_s
    return {
        "learner_step_s": max(0.0, rest_s),
        "learner_token_s": token_s * num_ranks / mean(steady, "rollout/tokens"),
    }


def _push_rates(steady: Lines, server: ServerConfig, num_servers: int) -> dict[str, float]:
    pushed = synced_lines(steady)
    transfer_s = mean(pushed, "weight_sync/transfer_seconds")
    stalled_by_it_s = 0.0 if server.overlap_weight_loading else transfer_s
    return {
        "weight_sync_s": max(0.0, mean(pushed, "weight_sync/seconds") - transfer_s),
        "weight_sync_feed_s": transfer_s / num_servers,
        "weight_sync_stall_s": max(0.0, mean(pushed, "weight_sync/stall_seconds") - stalled_by_it_s),
    }
