"""The numbers of a run, read from its directory: `metrics.jsonl`, `samples.jsonl` and the ledger.

`slipstream report`, the demo and the HTML report share these numbers. Reading changes nothing in the run
directory, so the run may still be active.
Invariant: steps undone by a resume are not counted, neither here nor in the ledger.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, BinaryIO

import msgspec

from learner.evaluation.results import FILE, Estimate, Evaluation, earlier
from learner.rollouts.bottleneck import DESCRIPTIONS, shares
from learner.rollouts.ledger import Ledger, LedgerCounts
from protocol.errors import SlipstreamError
from protocol.former_keys import current_metrics


class RunDirectoryError(SlipstreamError):
    """A directory is not a run directory, has no step yet, or has an unreadable file."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `slipstream report --json`. None: the run has no such value."""

    steps: int
    seconds: float
    reward_first: float | None
    """Mean of reward/mean over the first tenth of the steps, at least one."""
    reward_last: float | None
    exact_last: float | None
    staleness_mean: float | None
    staleness_max: float | None
    groups_admitted: int
    groups_consumed: int
    groups_dropped: int
    groups_outstanding: int
    groups_lost: int
    prompts_dropped: int
    """Number of prompts dropped for their length."""
    prompts_truncated: int
    push_stall_median_s: float | None
    mismatch_mean_abs_logprob: float | None
    """Larger of two means over the steps: fresh tokens in training, and parity probes."""
    evaluation: Estimate | None
    """Reward of the newest evaluation that the run itself made, unless it has several sets."""
    evaluation_step: int | None
    evaluated_sets: dict[str, Estimate]
    """Reward of each evaluation set, if there are several."""
    training_slowdown: float | None
    """Median ratio of step times with and without a concurrent evaluation."""
    completion_tokens_per_s: float | None
    wait_shares: dict[str, float]
    """Share of the total step time for which each part was the bottleneck.

    The largest share is first. The parts are those of rollouts/bottleneck.py.
    """

    @property
    def waited_for(self) -> tuple[str, float] | None:
        """Main bottleneck and its share, or None."""
        part, share = next(iter(self.wait_shares.items()), ("", 0.0))
        return (part, share) if share > 0 else None


class LedgerFacts(msgspec.Struct, frozen=True):
    """Data from the ledger for the report, read in one opening."""

    counts: LedgerCounts
    staleness_histogram: dict[int, int]


def summarize(run_dir: Path) -> Summary:
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir)
    return summary_of(metrics, read_ledger(run_dir), read_evaluations(run_dir))


def summary_of(metrics: list[dict[str, float]], ledger: LedgerFacts, evaluations: Sequence[Evaluation]) -> Summary:
    seconds = float(metrics[-1].get("elapsed_s", 0.0))
    tenth = max(1, len(metrics) // 10)
    staleness_max = _present(metrics, "staleness/max")
    stalls = _present(metrics, "weight_sync/stall_seconds")
    mismatches = [
        fmean(values)
        for name in ("policy/mismatch_abs_logprob", "parity/abs_logprob")
        if (values := _present(metrics, name))
    ]
    # Seconds of the same steps: those of steps that a resume has undone are part of elapsed_s.
    timed = [line for line in metrics if _present([line], "rollout/tokens") and _present([line], "time/step")]
    step_s = sum(_present(timed, "time/step"))
    slowdowns = _present(metrics, "evaluation/training_slowdown")
    return Summary(
        steps=len(metrics),
        seconds=seconds,
        reward_first=_mean(metrics[:tenth], "reward/mean"),
        reward_last=_mean(metrics[-tenth:], "reward/mean"),
        exact_last=_mean(metrics[-tenth:], "reward/exact_match"),
        staleness_mean=_mean(metrics, "staleness/mean"),
        staleness_max=max(staleness_max) if staleness_max else None,
        groups_admitted=ledger.counts.admitted,
        groups_consumed=ledger.counts.consumed,
        groups_dropped=ledger.counts.dropped,
        groups_outstanding=ledger.counts.outstanding,
        groups_lost=ledger.counts.lost,
        prompts_dropped=_newest(metrics, "data/dropped_prompts"),
        prompts_truncated=_newest(metrics, "data/truncated_prompts"),
        push_stall_median_s=median(stalls) if stalls else None,
        mismatch_mean_abs_logprob=max(mismatches) if mismatches else None,
        evaluation=evaluations[-1].reward if evaluations and evaluations[-1].set_name is None else None,
        evaluation_step=evaluations[-1].step if evaluations else None,
        evaluated_sets={
            one.set_name: one.reward
            for one in evaluations
            if one.set_name is not None and one.reward is not None and one.step == evaluations[-1].step
        },
        training_slowdown=median(slowdowns) if slowdowns else None,
        completion_tokens_per_s=sum(_present(timed, "rollout/tokens")) / step_s if step_s > 0 else None,
        wait_shares=shares(metrics),
    )


def format_summary(summary: Summary) -> str:
    """Format the summary as aligned lines for a console."""
    s = summary
    stall = (
        "–" if s.push_stall_median_s is None else f"{1000 * s.push_stall_median_s:.0f} ms without generation (median)"
    )
    groups = (
        f"{s.groups_admitted:,} admitted = {s.groups_consumed:,} consumed + {s.groups_dropped:,} dropped"
        f" + {s.groups_outstanding:,} outstanding; {s.groups_lost:,} lost"
    )
    rows = [
        ("reward", f"{number(s.reward_first)} → {number(s.reward_last)} (first and last tenth of the steps)"),
        ("exact match", f"{number(s.exact_last)} (last tenth)" if s.exact_last is not None else None),
        *((name, f"{reward} after step {s.evaluation_step}") for name, reward in evaluation_by_label(s).items()),
        (
            "slowdown",
            f"steps take {s.training_slowdown:.2f} times as long during an evaluation" if s.training_slowdown else None,
        ),
        ("steps", f"{s.steps:,} in {duration(s.seconds)}"),
        ("staleness", f"mean {number(s.staleness_mean)}, max {number(s.staleness_max, '.0f')} policy versions"),
        ("groups", groups),
        ("prompts", _too_long(s)),
        ("weight sync", stall),
        ("mismatch", f"{number(s.mismatch_mean_abs_logprob, '.1e')} mean |Δ logprob| between server and learner"),
        ("speed", f"{number(s.completion_tokens_per_s, ',.0f')} completion tokens/s"),
        (
            "waits",
            f"mostly for {DESCRIPTIONS[s.waited_for[0]]} ({s.waited_for[1]:.0%} of the time)" if s.waited_for else None,
        ),
    ]
    return "\n".join(f"{label:<12} {text}" for label, text in rows if text is not None)


def evaluation_by_label(s: Summary) -> dict[str, Estimate]:
    """Return the reward of each evaluation set under the label shown to readers."""
    if s.evaluated_sets:
        return {f"evaluation of {name}": reward for name, reward in s.evaluated_sets.items()}
    return {"evaluation": s.evaluation} if s.evaluation else {}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of equal length as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def number(value: float | None, spec: str = ".2f") -> str:
    return "–" if value is None else format(value, spec)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


# ---- the files of a run
def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return one dict per optimizer step, in order.

    Raises:
        RunDirectoryError: The file is missing, broken or has no step.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise RunDirectoryError(
            f"{run_dir} is not a run directory: metrics.jsonl is missing; start a run with `slipstream train`, or use "
            "the directory that it printed at the start"
        )
    metrics = read_steps(path, lambda raw: current_metrics(json.loads(raw)))
    if not metrics:
        raise RunDirectoryError(f"{path} has no optimizer step yet; wait for the first step")
    return metrics


def read_ledger(run_dir: Path) -> LedgerFacts:
    path = run_dir / "ledger.db"
    if not path.is_file():
        raise RunDirectoryError(
            f"{run_dir} is not a complete run directory: ledger.db, which records lost groups, is missing; copy the "
            "run directory with all its files (including ledger.db-wal while the run is active)"
        )
    ledger = Ledger(path, read_only=True)
    try:
        return LedgerFacts(ledger.counts(), ledger.staleness_histogram())
    finally:
        ledger.close()


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return the evaluations that the run itself made, in order of steps.

    Raises:
        ConfigError: The file has other content.
    """
    made = [one for one in earlier(run_dir / FILE) if one.step is not None and one.reward is not None]
    return sorted(made, key=lambda one: one.step or 0)


def read_steps(path: Path, decode: Callable[[bytes], dict[str, Any]] = json.loads) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file that has a "step" in each."""
    with path.open("rb") as file:
        return steps_in(_lines_of(file), path, decode)


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file one by one, as `split` returns them: an empty one after the last line end.

    The lines of a long run take more memory than its numbers.
    """
    line = b"\n"
    for line in file:
        yield line.removesuffix(b"\n")
    if line.endswith(b"\n"):
        yield b""


def steps_in(
    raw_lines: Iterable[bytes], path: Path, decode: Callable[[bytes], dict[str, Any]] = json.loads
) -> list[dict[str, Any]]:
    """Parse lines into steps.

    A step that a resume wrote again replaces the old one and all steps after it.
    The torn last line of a killed writer is skipped.

    Raises:
        RunDirectoryError: Any other line is broken.
    """
    of_step: dict[int, dict[str, Any]] = {}
    newest, broken = -1, None
    for i, raw in enumerate(raw_lines, start=1):
        if broken is not None:
            raise broken
        if not raw.strip():
            continue
        try:
            line = decode(raw)
            step = line["step"]
            if not isinstance(step, int):
                raise TypeError(f"the step is {step!r}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            broken = RunDirectoryError(
                f'{path}, line {i}: expected a JSON object with an integer "step", found {raw[:60]!r} ({error}); '
                "remove or repair that line"
            )
            continue
        if step <= newest:
            of_step = {kept: of_step[kept] for kept in of_step if kept < step}
        of_step[step] = line
        newest = step
    return [of_step[step] for step in sorted(of_step)]


def _present(metrics: Sequence[dict[str, float]], name: str) -> list[float]:
    """Return the finite values of a metric from the steps that have it."""
    found = (line.get(name) for line in metrics)
    return [float(value) for value in found if value is not None and math.isfinite(value)]


def _newest(metrics: Sequence[dict[str, float]], name: str) -> int:
    """Return the last value of a count, or 0 without any."""
    return int(metrics[-1].get(name, 0))


def _too_long(summary: Summary) -> str | None:
    counts = {"dropped": summary.prompts_dropped, "truncated": summary.prompts_truncated}
    parts = [f"{count:,} too long, {done}" for done, count in counts.items() if count]
    return "; ".join(parts) or None


def _mean(metrics: Sequence[dict[str, float]], name: str) -> float | None:
    values = _present(metrics, name)
    return fmean(values) if values else None
