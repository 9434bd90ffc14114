"""Rates from the directory of a run: its metrics say what learner and pushes cost, its ledger how fast servers decode.

    RUN_DIR/config.toml, metrics.jsonl, ledger.db ─▶ MeasuredRun ─▶ what it came to
                                                                 └▶ Rates

Invariant: of a run both are of the same steps, all but the first quarter.
"""

import json
import sqlite3
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from deploy.planning.rates import Lengths, Rates
from deploy.planning.replay import Asked, Servers, fit_decoding
from inference_server.config import ServerConfig, ServerRun
from learner.config import LearnerConfig, LearnerRun
from protocol.config import load_config
from protocol.errors import ConfigError

WARM_UP_SHARE = 0.25
LEAST_STEPS = 8
TOKEN_PHASES = ("time/forward_backward", "time/reference", "time/policy_pass")
"""Of a step, those that take as long as it has tokens."""
PROGRAM = "python -m deploy.plan"
ANY_ENDPOINT = "tcp://127.0.0.1:1"
"""Nobody connects to it, so that which of several servers this is need not be said."""
SQL = """SELECT admitted_version, num_tokens, admitted_at, received_at, scored_at FROM groups
WHERE scored_at IS NOT NULL AND received_at > admitted_at ORDER BY admitted_at, slot"""

Lines = Sequence[dict[str, Any]]


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What the run came to, under the names of Outcome."""

    samples_per_s: float
    step_s: float
    learner_idle_frac: float
    server_idle_frac: float
    """Share of the time in which no group was asked for that had not come."""
    staleness_mean: float
    staleness_max: int


def learner_section(arguments: Sequence[str]) -> LearnerConfig:
    """Of a config file and flags. Raises ConfigError."""
    return load_config(LearnerRun, arguments, PROGRAM).in_effect().learner


def server_section(arguments: Sequence[str]) -> ServerConfig:
    """Of a config file and flags. Raises ConfigError."""
    return load_config(ServerRun, [*arguments, "--endpoint", ANY_ENDPOINT], PROGRAM).server


class MeasuredRun(NamedTuple):
    """What a run directory tells."""

    learner: LearnerConfig
    server: ServerConfig
    num_servers: int
    lines: Lines
    """Of metrics.jsonl."""
    asked: list[Asked]


def read_run(run_dir: Path) -> MeasuredRun:
    """Raises ConfigError for what is no run directory, or one of too few steps."""
    config_file = str(run_dir / "config.toml")
    learner, server = learner_section([config_file]), server_section([config_file])
    uri = f"{(run_dir / 'ledger.db').absolute().as_uri()}?mode=ro"
    try:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        with closing(sqlite3.connect(uri, uri=True)) as ledger:
            asked = [Asked(*row) for row in ledger.execute(SQL)]
    except (OSError, ValueError, sqlite3.Error) as error:
        raise ConfigError(f"{run_dir} cannot be read as a run directory: {error}") from error
    if len(lines) < LEAST_STEPS or not asked:
        raise ConfigError(
            f"{run_dir} has {len(lines)} steps and {len(asked)} groups; at least {LEAST_STEPS} steps are needed to tell its rates"
        )
    num_servers = round(statistics.median(line.get("servers/ready", 1) for line in lines[_warm_up(lines) :]))
    return MeasuredRun(learner, server, num_servers, lines, asked)


def rates_of(run: MeasuredRun, *, num_ranks: int) -> tuple[Rates, float]:
    """Return its rates, and by what share the median group misses its seconds at those of decoding. Raises ConfigError."""
    steady, server = run.lines[_warm_up(run.lines) :], run.server
    try:
        rates = Rates(
            lengths=_lengths(steady),
            decode_step_s=0.0,
            decode_token_s=1.0,
            score_s=statistics.median(group.scored_at - group.received_at for group in run.asked),
            **_learner_rates(run, num_ranks),
            **_push_rates(steady, server, run.num_servers),
        )
    except KeyError as error:
        raise ConfigError(
            f"metrics.jsonl lacks the metric {error.args[0]}, which a learner writes in every step"
        ) from error
    stall_s = rates.stall_seconds(run.num_servers, receive_overlap=server.receive_overlap)
    servers = Servers(num=run.num_servers, capacity=server.capacity, stall_s=stall_s)
    return fit_decoding(rates, run.asked, run.learner.sampling.num_completions, servers)


def observed(run: MeasuredRun) -> Observed:
    lines, first = run.lines, _warm_up(run.lines)
    steady, step_s = lines[first:], _step_s(lines)
    return Observed(
        samples_per_s=run.learner.groups_per_step * run.learner.sampling.num_completions / step_s,
        step_s=step_s,
        learner_idle_frac=_mean(steady, "time/wait_for_batch") / step_s,
        server_idle_frac=idle_frac(run.asked, lines[first - 1]["time"], lines[-1]["time"]),
        staleness_mean=_mean(steady, "staleness/mean"),
        staleness_max=round(max(line["staleness/max"] for line in steady)),
    )


def idle_frac(asked: Sequence[Asked], start: float, end: float) -> float:
    """Share of this time in which no group was under way. The metric of that name tells of the end of each step alone."""
    busy_s, busy_until = 0.0, start
    for group in asked:  # in the order in which they were asked for
        began, ended = max(group.admitted_at, busy_until), min(group.received_at, end)
        if ended > began:
            busy_s += ended - began
            busy_until = ended
    return 1 - busy_s / (end - start)


def _warm_up(lines: Lines) -> int:
    return max(1, round(len(lines) * WARM_UP_SHARE))


def _mean(lines: Lines, metric: str) -> float:
    return statistics.fmean(line[metric] for line in lines)


def _step_s(lines: Lines) -> float:
    """Between the ends of steps: logging and checkpoints are in it."""
    first = _warm_up(lines)
    return (lines[-1]["elapsed_s"] - lines[first - 1]["elapsed_s"]) / (len(lines) - first)


def _lengths(steady: Lines) -> Lengths:
    prefix = "rollout/completion_length_"
    return Lengths(
        p10=_mean(steady, f"{prefix}p10"),
        p50=_mean(steady, f"{prefix}p50"),
        p90=_mean(steady, f"{prefix}p90"),
        mean=_mean(steady, f"{prefix}mean"),
        max=max(line[f"{prefix}max"] for line in steady),
        truncated_frac=_mean(steady, "rollout/truncated_frac"),
    )


def _learner_rates(run: MeasuredRun, num_ranks: int) -> dict[str, float]:
    steady = run.lines[_warm_up(run.lines) :]
    token_s = sum(_mean(steady, phase) for phase in TOKEN_PHASES if phase in steady[-1])
    push_s = 0.0 if run.learner.push.overlap else _mean(_pushed(steady), "push/seconds")
    rest_s = _step_s(run.lines) - _mean(steady, "time/wait_for_batch") - token_s - push_s
    return {
        "learner_step_s": max(0.0, rest_s),
        "learner_token_s": token_s * num_ranks / _mean(steady, "rollout/tokens"),
    }


def _pushed(lines: Lines) -> Lines:
    """With overlap a step may end before the push that it would tell of."""
    return [line for line in lines if "push/seconds" in line]


def _push_rates(steady: Lines, server: ServerConfig, num_servers: int) -> dict[str, float]:
    pushed = _pushed(steady)
    transfer_s = _mean(pushed, "push/transfer_seconds")
    stalled_by_it_s = 0.0 if server.receive_overlap else transfer_s
    return {
        "push_s": max(0.0, _mean(pushed, "push/seconds") - transfer_s),
        "push_feed_s": transfer_s / num_servers,
        "push_stall_s": max(0.0, _mean(pushed, "push/stall_seconds") - stalled_by_it_s),
    }
