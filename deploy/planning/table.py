"""A plan for people: the splits, the rates that they rest on, what is assumed, and predictions beside what was measured."""

from collections.abc import Sequence
from typing import Any

HEAD = ("GPUs", "servers × ranks", "groups", "samples/s", "step s", "server idle", "stalled", "fill", "learner idle", "pushing",
        "staleness", "max")  # fmt: skip
CHECK_HEAD = ("run", "", "samples/s", "step s", "server idle", "learner idle", "staleness", "max")


def as_text(result: dict[str, Any]) -> str:
    parts = []
    if result["rows"]:
        parts.append(columns([HEAD, *map(_row, result["rows"])]))
    if result["checks"]:
        lines = [line for check in result["checks"] for line in _check(check)]
        parts.append(columns([CHECK_HEAD, *lines]))
    rates = ", ".join(f"{name} {_short(value)}" for name, value in result["rates"].items() if name != "lengths")
    lengths = ", ".join(f"{name} {value:.4g}" for name, value in result["rates"]["lengths"].items())
    if result["decoding_error"] is not None:
        rates += f" (at which the median group of the measured run takes {result['decoding_error']:.1%} too long or too short)"
    assumed = "\n".join(f"  {line}" for line in result["assumptions"])
    return "\n\n".join([*parts, f"rates: {rates}; lengths: {lengths}\nassumed:\n{assumed}"])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned, but for the first column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )  # fmt: skip


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
        f"{outcome['learner_push_frac']:.1%}",
        f"{outcome['staleness_mean']:.2f}",
        f"{outcome['staleness_max']}",
    )


def _check(check: dict[str, Any]) -> list[tuple[str, ...]]:
    servers = f"{check['run_dir']}, {check['servers']} server{'s' if check['servers'] > 1 else ''}"
    return [_seen(servers, "measured", check["measured"]), _seen("", "predicted", check["predicted"])]


def _seen(run: str, what: str, seen: dict[str, Any]) -> tuple[str, ...]:
    return (
        run,
        what,
        f"{seen['samples_per_s']:,.1f}",
        _short(seen["step_s"]),
        f"{seen['server_idle_frac']:.1%}",
        f"{seen['learner_idle_frac']:.1%}",
        f"{seen['staleness_mean']:.2f}",
        f"{seen['staleness_max']}",
    )


def _short(value: float) -> str:
    return f"{value:.3g}"
