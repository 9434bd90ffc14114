"""A planner for dividing GPUs: `slipstream plan run.toml --gpus 8 64 --measured runs/demo`.

    run.toml ─▶ groups requested and taken ┐
    a run directory, or flags ─▶ rates     ├─▶ simulations of the splits that could be best ─▶ table, or JSON
    GPUs ─▶ n servers × m ranks            ┘

With --measured, the planner also simulates that run and shows the prediction next to the measurement.
Config keys are flags as elsewhere: --learner.max-staleness 4 --server.max-concurrent-sequences 512.
The table shows the splits, the rates behind them, and the assumptions.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from deploy.arguments import flags_by_section
from deploy.planning.measured import PROGRAM, learner_section, observed, rates_of, read_run, server_section
from deploy.planning.outcome import Outcome
from deploy.planning.rates import ASSUMPTIONS, Rates, decode_rate
from deploy.planning.servers import Failures
from deploy.planning.simulation import MOST_SERVERS, Setup, Split, search, simulate, splits
from protocol import console
from protocol.errors import ConfigError

HEAD = ("GPUs", "servers × ranks", "groups", "samples/s", "step s", "server idle", "stalled", "fill", "learner idle",
        "syncing", "staleness", "max")  # fmt: skip
CHECK_HEAD = ("run", "", "samples/s", "step s", "server idle", "learner idle", "staleness", "max")
LEAST_STEPS = 8
SEARCHED_STEPS = 24
SEARCHED_SERVERS = 64
"""Maximum number of simulated servers in the search, which only compares splits.

The best split is then simulated in full.
"""
RATE_FLAGS = {
    "score_s": "time from a group's arrival until it is scored and in the ledger",
    "learner_step_s": "fixed time of an optimizer step",
    "learner_sync_s": "additional time of an optimizer step with several ranks",
    "weight_sync_s": "fixed time of a weight sync",
    "weight_sync_feed_s": "additional time of a weight sync for each server",
    "weight_sync_stall_s": "time without generation in a weight sync, excluding the transfer",
}


def format_plan(result: dict[str, Any]) -> str:
    parts = []
    if result["rows"]:
        parts.append(columns([HEAD, *map(_row, result["rows"])]))
    if result["checks"]:
        lines = [line for check in result["checks"] for line in _check(check)]
        parts.append(columns([CHECK_HEAD, *lines]))
    rates = ", ".join(f"{name} {_short(value)}" for name, value in result["rates"].items() if name != "lengths")
    lengths = ", ".join(f"{name} {value:.4g}" for name, value in result["rates"]["lengths"].items())
    if result["decoding_error"] is not None:
        rates += f" (median error of a group's time in the measured run: {result['decoding_error']:.1%})"
    assumptions = "\n".join(f"  {line}" for line in result["assumptions"])
    return "\n\n".join([*parts, f"rates: {rates}; lengths: {lengths}\nassumptions:\n{assumptions}"])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align the columns to the right, except the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (list(map(str.rjust, row[1:], widths[1:])) for row in rows)
    return "\n".join("  ".join([row[0].ljust(widths[0]), *cells]) for row, cells in zip(rows, padded, strict=True))


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    outcome = row["outcome"]
    return (
        f"{row['gpus']:,}",
        f"{outcome['num_servers']:,} × {outcome['num_ranks']:,}",
        f"{row['groups_per_step']:,}",
        f"{outcome['samples_per_s']:,.1f}",
        _short(outcome["step_s"]),
        f"{outcome['server_idle_frac']:.1%}",
        f"{outcome['server_stalled_frac']:.1%}",
        f"{outcome['server_fill_frac']:.1%}",
        f"{outcome['learner_idle_frac']:.1%}",
        f"{outcome['learner_weight_sync_frac']:.1%}",
        f"{outcome['staleness_mean']:.2f}",
        f"{outcome['staleness_max']}",
    )


def _check(check: dict[str, Any]) -> list[tuple[str, ...]]:
    servers = f"{check['run_dir']}, {check['servers']} server{'s' if check['servers'] > 1 else ''}"
    return [_check_row(servers, "measured", check["measured"]), _check_row("", "predicted", check["predicted"])]


def _check_row(run: str, what: str, results: dict[str, Any]) -> tuple[str, ...]:
    return (
        run,
        what,
        f"{results['samples_per_s']:,.1f}",
        _short(results["step_s"]),
        f"{results['server_idle_frac']:.1%}",
        f"{results['learner_idle_frac']:.1%}",
        f"{results['staleness_mean']:.2f}",
        f"{results['staleness_max']}",
    )


def _short(value: float) -> str:
    return f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    words = console.pop_switches(sys.argv[1:] if arguments is None else arguments)
    console.start_logging()
    with console.exit_on_user_error(lambda: "plan"):
        options, flags = parse_options(words)
        result = plan(options, flags)
        print(json.dumps(result) if options.json else format_plan(result))


def parse_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the planner's own options and the flags of the config."""
    parser = console.ArgumentParser(PROGRAM, __doc__)
    add = parser.add_argument
    add("config", help="config file of the run")
    add("--gpus", type=count, nargs="+", default=[], help="numbers of GPUs to divide")
    add("--split", nargs="+", default=[], metavar="NxM", help="n servers and m ranks, simulated as given")
    add("--groups-per-gpu", type=positive, metavar="G", help="groups_per_step per GPU, instead of the config's")
    add(
        "--failures",
        type=number,
        nargs=2,
        metavar=("EVERY_S", "RESTART_S"),
        help="mean time until a server fails, and time until it is back",
    )
    add("--measured", type=Path, metavar="RUN_DIR", help="take the rates from this run")
    add("--measured-ranks", type=count, default=1, metavar="M", help="ranks of that run and of the --predict runs")
    add("--predict", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="runs to predict from the same rates")
    add("--steps", type=int, default=60, help="optimizer steps to simulate")
    add(
        "--most-servers",
        type=int,
        default=MOST_SERVERS,
        metavar="N",
        help="maximum number of simulated servers; above it, each represents several",
    )
    add("--seed", type=seed, default=0)
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add = parser.add_argument_group("rates", "override the measured rates; in seconds").add_argument
    add(
        "--lengths",
        type=number,
        nargs=5,
        metavar=("P10", "P50", "P90", "MEAN", "MAX"),
        help="completion lengths in tokens",
    )
    add(
        "--decode",
        nargs="+",
        metavar="K:RATE",
        help="tokens/s of one server at K running sequences, for at least two K",
    )
    add("--train-tokens-per-s", type=positive, metavar="RATE", help="completion tokens/s of one rank")
    for name, what in RATE_FLAGS.items():
        add(f"--{name.replace('_', '-')}", type=number, metavar="S", help=what)
    return parser.parse_known_args(arguments)


def number(text: str) -> float:
    """Return a finite number. A simulation with another one would fail, or never end."""
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a finite number")


def positive(text: str) -> float:
    if (value := number(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"{text} must be above 0")


def seed(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not an integer of 0 or more")


def count(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not an integer of 1 or more")


def plan(options: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """Return rows, rates, checks and assumptions in one object. Raises ConfigError."""
    if options.steps < LEAST_STEPS or options.most_servers < 1:
        raise ConfigError(
            f"--steps {options.steps} --most-servers {options.most_servers}: expected {LEAST_STEPS} or more steps and "
            "1 or more servers"
        )
    if not (options.gpus or options.split or options.measured or options.predict):
        raise ConfigError("there is nothing to plan; set --gpus, --split or --measured")
    rates, decoding_error = rates_from(options)
    setup = setup_of(options, flags, rates)
    run = partial(simulate, steps=options.steps, seed=options.seed, most_servers=options.most_servers)
    rows = [divided(setup, num_gpus, options, run) for num_gpus in options.gpus]
    for split in map(split_of, options.split):
        num_gpus = split.num_servers * setup.server.num_workers + split.num_ranks
        rows.append(row_of(num_gpus, with_split(setup, split, num_gpus, options.groups_per_gpu), run))
    measured = [run_dir for run_dir in (options.measured, *options.predict) if run_dir is not None]
    return {
        "rows": rows,
        "rates": msgspec.to_builtins(rates),
        "decoding_error": decoding_error,
        "checks": [check(run_dir, setup, options.measured_ranks, run) for run_dir in measured],
        "assumptions": list(ASSUMPTIONS),
    }


Simulate = Callable[[Setup], Outcome]


def divided(setup: Setup, num_gpus: int, options: argparse.Namespace, run: "partial[Outcome]") -> dict[str, Any]:
    """Search the splits with short simulations, then simulate the best one in full."""
    candidates = {
        split: with_split(setup, split, num_gpus, options.groups_per_gpu)
        for split in splits(num_gpus, setup.server.num_workers)
    }
    in_short = partial(run, steps=min(SEARCHED_STEPS, options.steps), most_servers=SEARCHED_SERVERS)
    found = search(candidates.values(), in_short)
    best = candidates[Split(found[0].num_servers, found[0].num_ranks)]
    return row_of(num_gpus, best, run) | {"searched": msgspec.to_builtins(found)}


def row_of(num_gpus: int, setup: Setup, run: Simulate) -> dict[str, Any]:
    return {
        "gpus": num_gpus,
        "groups_per_step": setup.learner.groups_per_step,
        "outcome": msgspec.to_builtins(run(setup)),
    }


def check(run_dir: Path, setup: Setup, num_ranks: int, run: Simulate) -> dict[str, Any]:
    """Return the measured results of a run and the prediction at the rates of `setup`."""
    measured = read_run(run_dir)
    measured_setup = msgspec.structs.replace(
        setup,
        learner=measured.learner,
        server=measured.server,
        num_servers=measured.num_servers,
        num_ranks=num_ranks,
        failures=None,
    )
    return {
        "run_dir": str(run_dir),
        "servers": measured.num_servers,
        "measured": msgspec.to_builtins(observed(measured)),
        "predicted": msgspec.to_builtins(run(measured_setup)),
    }


def setup_of(options: argparse.Namespace, flags: Sequence[str], rates: Rates) -> Setup:
    """Return the setup for one server and one rank. Raises ConfigError."""
    flags_of = flags_by_section(list(flags))
    if others := flags_of["deploy"]:  # also flags of no section, which go to all
        raise ConfigError(
            f"unknown flag {others[0]}; see {PROGRAM} --help (config keys start with --learner. or --server.)"
        )
    learner = learner_section([options.config, *flags_of["learner"]])
    server = server_section([options.config, *flags_of["server"]])
    failures = Failures(every_s=options.failures[0], restart_s=options.failures[1]) if options.failures else None
    if failures and (failures.every_s <= 0 or failures.restart_s < 0):
        raise ConfigError(
            f"--failures {failures.every_s:g} {failures.restart_s:g}: expected EVERY_S above 0 and RESTART_S 0 or more"
        )
    longest_s = rates.decode_s(1) * rates.lengths.max
    if failures and failures.every_s < longest_s:  # the simulation might never end
        raise ConfigError(
            f"--failures {failures.every_s:g} {failures.restart_s:g}: most servers would fail before they have decoded "
            f"{rates.lengths.max:g} tokens, which takes {longest_s:.3g} s; raise EVERY_S"
        )
    return Setup(learner=learner, server=server, rates=rates, num_servers=1, num_ranks=1, failures=failures)


def rates_from(options: argparse.Namespace) -> tuple[Rates, float | None]:
    """Return the rates, where flags override measured ones, and any decoding error.

    Raises:
        ConfigError: Rates are missing or invalid.
    """
    given: dict[str, Any] = {name: value for name in RATE_FLAGS if (value := getattr(options, name)) is not None}
    if options.lengths:
        given["lengths"] = dict(zip(("p10", "p50", "p90", "mean", "max"), options.lengths, strict=True))
    if options.decode:
        given["decode_step_s"], given["decode_token_s"] = decode_rate([_point(text) for text in options.decode])
    if options.train_tokens_per_s:
        given["learner_token_s"] = 1 / options.train_tokens_per_s
    decoding_error = None
    if options.measured:
        measured, decoding_error = rates_of(read_run(options.measured), num_ranks=options.measured_ranks)
        given = msgspec.to_builtins(measured) | given
    elif missing := [flag for flag in ("lengths", "decode", "train_tokens_per_s") if not getattr(options, flag)]:
        named = ", ".join(f"--{flag.replace('_', '-')}" for flag in missing)
        raise ConfigError(f"rates are missing; set {named}, or take them from a run with --measured RUN_DIR")
    try:
        return msgspec.convert(given, Rates), decoding_error
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid rates: {error}") from error


def with_split(setup: Setup, split: Split, num_gpus: int, groups_per_gpu: float | None) -> Setup:
    learner = setup.learner
    if groups_per_gpu is not None:
        groups_per_step = max(1, round(groups_per_gpu * num_gpus))
        learner = msgspec.structs.replace(learner, groups_per_step=groups_per_step)
    return msgspec.structs.replace(setup, learner=learner, num_servers=split.num_servers, num_ranks=split.num_ranks)


def split_of(text: str) -> Split:
    num_servers, _, num_ranks = text.partition("x")
    if not (num_servers.isdecimal() and num_ranks.isdecimal() and int(num_servers) and int(num_ranks)):
        raise ConfigError(f"--split {text}: expected servers and ranks, such as 6x2")
    return Split(int(num_servers), int(num_ranks))


def _point(text: str) -> tuple[float, float]:
    running, _, rate = text.partition(":")
    try:
        return number(running), number(rate)
    except argparse.ArgumentTypeError:
        raise ConfigError(f"--decode {text}: expected running sequences and tokens/s, such as 64:3000") from None


if __name__ == "__main__":
    main()
