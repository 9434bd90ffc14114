"""The table of the GPU benchmark: what each side did in its steady steps, from its own records. Pure.

    metrics.jsonl, or what TRL logged ─▶ SideTotals: sums over the steps after the first ones ─▶ rates, shares ─▶ table

MFU is arithmetic ÷ seconds ÷ the device's peak. The arithmetic is that of one forward and backward pass over prompts
and completions, by the formula of learner/training/metrics.py, each prompt once for its group; generation does not
count. It is the same on both sides.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from learner.policy.model_shape import ModelShape
from learner.training.metrics import TERA
from tests.bench.steps import Step, seconds_per_step

NONE = "–"


class SideTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the steady steps of one side, in the units of their names. None: this side does not have or record
    it."""

    name: str
    num_steps: int
    seconds: float
    num_samples: int
    sampled_tokens: float
    trained_tokens: float
    """Prompts, once for each completion, and completions."""
    train_tflop: float
    training_s: float | None = None
    """Of the learner, without its waits for batches and its weight syncs."""
    learner_idle_frac: float | None = None
    server_idle_frac: float | None = None
    """By the server's own count of seconds."""
    sync_s: float | None = None
    """Median of a weight sync, as for the next two."""
    stall_s: float | None = None
    sync_bytes: float | None = None
    staleness: float
    mismatch: float | None = None
    """Mean |Δ logprob| of what generates and what trains, with the same weights: ours after a weight sync. Short steps
    leave only the check before the first."""
    peak_gib: float | None = None
    """Of the GPU memory that the trainer's torch has held."""
    first_reward: float
    last_reward: float


def our_totals(
    name: str, lines: Sequence[dict[str, Any]], warm_up: int, samples_per_step: int,
    server_idle_frac: float | None = None
) -> SideTotals:  # fmt: skip
    """Of a learner of one rank, from the lines of its metrics.jsonl after the first `warm_up`, of which there is at
    least one."""
    steady = lines[warm_up:]
    steps_s = [line["time/step"] for line in steady]

    def total(metric: str) -> float:
        return sum(line[metric] for line in steady)

    def product(metric: str) -> float:
        return sum(line[metric] * step_s for line, step_s in zip(steady, steps_s, strict=True))

    def middle(metric: str, of: Callable[[list[float]], float] = statistics.median) -> float | None:
        values = [line[metric] for line in steady if metric in line]
        return of(values) if values else None

    waits_s, syncs_s = total("time/wait_for_batch"), total("time/weight_sync")
    return SideTotals(
        name=name,
        num_steps=len(steady),
        seconds=steady[-1]["elapsed_s"] - lines[warm_up - 1]["elapsed_s"],
        num_samples=samples_per_step * len(steady),
        sampled_tokens=total("rollout/tokens"),
        trained_tokens=product("perf/tokens_per_s_per_device"),
        train_tflop=product("perf/tflops_per_device"),
        training_s=sum(steps_s) - waits_s - syncs_s,
        learner_idle_frac=waits_s / sum(steps_s),
        server_idle_frac=server_idle_frac,
        sync_s=middle("weight_sync/seconds"),
        stall_s=middle("weight_sync/stall_seconds"),
        sync_bytes=middle("weight_sync/bytes"),
        staleness=total("staleness/mean") / len(steady),
        mismatch=middle("parity/abs_logprob", statistics.fmean) or lines[0].get("parity/abs_logprob"),
        peak_gib=middle("memory/device_peak_gib", max),
        first_reward=steady[0]["reward/mean"],
        last_reward=steady[-1]["reward/mean"],
    )


def trl_totals(
    steps: Sequence[Step], warm_up: int, shape: ModelShape, prompt_tokens: int, group_size: int,
    peak_gib: float | None = None
) -> SideTotals:  # fmt: skip
    """Of a trainer that noted the length of each completion; prompts have one length."""
    steady = steps[warm_up:]
    lengths = [length for step in steady for length in step.lengths]
    mismatches = [step.mismatch for step in steady if step.mismatch is not None]
    return SideTotals(
        name="TRL",
        num_steps=len(steady),
        seconds=seconds_per_step(steps, warm_up) * len(steady),
        num_samples=len(lengths),
        sampled_tokens=sum(lengths),
        trained_tokens=sum(lengths) + prompt_tokens * len(lengths),
        train_tflop=sum(step_flops(shape, prompt_tokens, group_size, step.lengths) for step in steady) / TERA,
        staleness=0.0,
        mismatch=statistics.fmean(mismatches) if mismatches else None,
        peak_gib=peak_gib,
        first_reward=steady[0].reward_mean,
        last_reward=steady[-1].reward_mean,
    )


def step_flops(shape: ModelShape, prompt_tokens: int, group_size: int, lengths: Sequence[int]) -> float:
    """Operations of one pass forward and backward over groups whose completions have these lengths, a prompt once
    for each group."""
    num_groups = len(lengths) / group_size
    tokens = num_groups * prompt_tokens + sum(lengths)
    pairs = num_groups * prompt_tokens**2 / 2 + sum(length * (prompt_tokens + length / 2) for length in lengths)
    return 6 * (shape.num_active - shape.num_embedding) * tokens + 12 * shape.num_layers * shape.hidden_size * pairs


class Row(msgspec.Struct, frozen=True):
    """A row of the table."""

    title: str
    value: Callable[[SideTotals], float | None]
    form: str = "{:,.0f}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def _busy_server_s(side: SideTotals) -> float | None:
    return None if side.server_idle_frac is None else side.seconds * (1 - side.server_idle_frac)


def rows_of_table(peak_tflops: float) -> list[Row]:
    """All rows, for a device of this peak."""
    return [
        Row("samples/s", lambda side: ratio(side.num_samples, side.seconds), "{:,.1f}"),
        Row("step, s", lambda side: ratio(side.seconds, side.num_steps), "{:.3f}"),
        Row("server: completion tokens/s", lambda side: ratio(side.sampled_tokens, side.seconds)),
        Row("server: the same while it has work", lambda side: ratio(side.sampled_tokens, _busy_server_s(side))),
        Row("learner: tokens/s", lambda side: ratio(side.trained_tokens, side.seconds)),
        Row("learner: the same while it trains", lambda side: ratio(side.trained_tokens, side.training_s)),
        Row("MFU", lambda side: ratio(side.train_tflop, side.seconds * peak_tflops), "{:.3f}"),
        Row("MFU while it trains", lambda side: ratio(side.train_tflop, (side.training_s or 0) * peak_tflops),
            "{:.3f}"),
        Row("weight sync, s", lambda side: side.sync_s, "{:.3f}"),
        Row("weight sync, GiB/s", lambda side: ratio((side.sync_bytes or 0) / 2**30, side.sync_s), "{:.2f}"),
        Row("stall of generation by a sync, s", lambda side: side.stall_s, "{:.3f}"),
        Row("server idle, share", lambda side: side.server_idle_frac, "{:.3f}"),
        Row("learner idle, share", lambda side: side.learner_idle_frac, "{:.3f}"),
        Row("staleness, versions", lambda side: side.staleness, "{:.2f}"),
        Row("mismatch, mean abs(Δ logprob)", lambda side: side.mismatch, "{:.1e}"),
        Row("peak memory of the trainer, GiB", lambda side: side.peak_gib, "{:.1f}"),
        Row("reward, first steady step", lambda side: side.first_reward, "{:.3f}"),
        Row("reward, last step", lambda side: side.last_reward, "{:.3f}"),
    ]  # fmt: skip


def as_markdown(sides: Sequence[SideTotals], peak_tflops: float) -> str:
    """One column for each side. The first row compares samples/s with the last side, if that is TRL."""
    header = ["", *(side.name for side in sides)]
    table = [header, ["---"] * len(header)]
    samples_per_s = [side.num_samples / side.seconds for side in sides]
    if len(sides) > 1 and sides[-1].name == "TRL":
        table.append(["samples/s ÷ TRL's", *(f"{rate / samples_per_s[-1]:.2f}" for rate in samples_per_s)])
    for row in rows_of_table(peak_tflops):
        values = [row.value(side) for side in sides]
        if any(value is not None for value in values):
            table.append([row.title, *(NONE if value is None else row.form.format(value) for value in values)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table) + "\n"
