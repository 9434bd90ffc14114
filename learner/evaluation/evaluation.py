"""What an evaluation found: means with intervals, beside those of the evaluations before it. A line of RUN_DIR/evaluations.jsonl.

    answers, rewards (evaluate.py) ─▶ estimates.py ─▶ Evaluation ─▶ evaluations.jsonl ─▶ the console, the report

Invariant: two evaluations are compared only if they asked the same prompts in the same way, and none with one whose weights a resume
has thrown away.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from learner.evaluation.estimates import Estimate, of_means
from learner.storage.disk import replace_file
from learner.storage.lines import Lines, whole_lines
from protocol.errors import ConfigError

FILE = "evaluations.jsonl"


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A line of evaluations.jsonl."""

    time: float
    """Seconds since 1970."""
    step: int | None = None
    """After which it was begun, of a run that evaluates; None: by `learner evaluate`."""
    set_name: str | None = None
    """Which of several sets (learner.evaluation.sets)."""
    data: str
    asked: str
    """Digest of the prompts and of how they were asked: those with the same can be compared."""
    url: str
    model: str
    versions: tuple[int, int] | None
    """The oldest and the newest that sampled a token; None: the server does not tell."""
    num_prompts: int
    num_samples: int
    temperature: float
    seconds: float
    reward: Estimate | None
    """None: nothing could be scored."""
    functions: dict[str, Estimate | None]
    pass_at: dict[str, dict[str, Estimate]]
    """By function that only says 0 or 1, then by k: the share of prompts of which one of k samples is right."""
    majority: Estimate | None
    """The reward of the answer that most samples of a prompt gave; with more than two samples."""
    reward_finished: Estimate | None
    """Of the completions that ended by themselves alone."""
    truncated_frac: float
    length_mean: float
    """In tokens."""
    rewards_P: list[float | None]
    """Of each prompt, its mean."""
    ends: dict[str, int] = {}
    """Of episodes: how many ended how; silent: the policy said nothing in it."""
    turns_mean: float | None = None
    """Likewise."""
    difference: Estimate | None = None
    """To the evaluation before that asked the same, prompt by prompt."""
    before: tuple[int, int] | None = None
    """The versions of that one."""
    difference_to_first: Estimate | None = None
    """To the first that asked the same, where that is another than the one before."""


def note(path: Path, made: Evaluation) -> Evaluation:
    """Append it, compared with those before. Raises ConfigError for a file that holds something else, DiskError."""
    made = compared(made, earlier(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = Lines(path)
    try:
        lines.append(msgspec.to_builtins(made))
    finally:
        lines.close()
    return made


def compared(made: Evaluation, before: Sequence[Evaluation]) -> Evaluation:
    """With the differences to the newest and to the first that asked the same, over the prompts that both could score."""
    alike = [one for one in before if one.asked == made.asked]
    if not alike:
        return made
    return msgspec.structs.replace(
        made,
        difference=_difference(made, alike[-1]),
        before=alike[-1].versions,
        difference_to_first=_difference(made, alike[0]) if len(alike) > 1 else None,
    )


def earlier(path: Path) -> list[Evaluation]:
    """What was noted so far. Raises ConfigError for a file that holds something else."""
    if not path.is_file():
        return []
    try:
        whole = path.read_bytes()[: whole_lines(path)]
        return [msgspec.json.decode(line, type=Evaluation) for line in whole.splitlines()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds a line that is no evaluation ({error}); move it away") from error


def take_back(path: Path, step: int) -> None:
    """Remove what was noted after later steps than the one that a run resumes at: they come again, with other weights.

    Raises ConfigError for a file that holds something else, DiskError.
    """
    noted = earlier(path)
    left = [one for one in noted if one.step is None or one.step <= step]
    if len(left) < len(noted):
        replace_file(path, b"".join(msgspec.json.encode(one) + b"\n" for one in left))


def as_text(made: Evaluation) -> str:
    """For a console."""
    sampled = (
        "greedy" if made.temperature == 0 else f"{made.num_samples} samples each at temperature {made.temperature:g}"
    )
    rows = [("reward", made.reward), *made.functions.items()]
    rows += [(f"{name} pass@{k}", share) for name, by_k in made.pass_at.items() for k, share in by_k.items()]
    rows += [("majority", made.majority)] if made.majority is not None else []
    rows += [("finished only", made.reward_finished)]
    width = max(len(name) for name, _ in rows)
    set_name = f"{made.set_name}: " if made.set_name else ""
    lines = [
        f"{set_name}{made.num_prompts:,} prompts of {made.data}, {sampled}, by {versions_in_words(made.versions, made.model)}, {made.seconds:.1f} s"
    ]
    lines += [f"  {name:{width}}  {'–' if value is None else value}" for name, value in rows]
    lines.append(f"  {made.truncated_frac:.1%} cut off, {made.length_mean:,.0f} tokens on average; intervals of 95 %")
    if made.turns_mean is not None:
        ends = ", ".join(f"{count:,} {state}" for state, count in made.ends.items())
        lines.append(f"  episodes ended: {ends}; {made.turns_mean:.1f} turns on average")
    if made.difference is not None:
        before = versions_in_words(made.before, "the evaluation before")
        lines.append(f"  {made.difference} more than {before}, prompt by prompt")
    if made.difference_to_first is not None:
        lines.append(f"  {made.difference_to_first} more than the first, prompt by prompt")
    return "\n".join(lines)


def in_words(made: Evaluation) -> str:
    """For a line of the log."""
    of_set = f" of {made.set_name}" if made.set_name else ""
    parts = [f"evaluation{of_set} after step {made.step}: reward {'–' if made.reward is None else made.reward}"]
    if made.difference is not None:
        parts.append(f"{made.difference} more than the one before")
    who = versions_in_words(made.versions, made.model)
    return "; ".join([*parts, f"{made.num_prompts:,} prompts by {who} in {made.seconds:.1f} s"])


def metrics_of(made: Evaluation) -> dict[str, float]:
    """A number for each estimate, and the ends of its interval; of one of several sets under its name: evaluation/hard/reward."""
    found = {
        "evaluation/reward": made.reward,
        "evaluation/reward_finished": made.reward_finished,
        "evaluation/majority": made.majority,
        "evaluation/difference": made.difference,
        "evaluation/difference_to_first": made.difference_to_first,
    }
    found |= {f"evaluation/function/{name}": value for name, value in made.functions.items()}
    for name, by_k in made.pass_at.items():
        found |= {f"evaluation/pass_at_{k}/{name}": share for k, share in by_k.items()}
    metrics = {
        "evaluation/seconds": made.seconds,
        "evaluation/truncated_frac": made.truncated_frac,
        "evaluation/completion_length_mean": made.length_mean,
    }
    metrics |= {f"evaluation/ended_{state}": float(count) for state, count in made.ends.items()}
    if made.turns_mean is not None:
        metrics["evaluation/turns_mean"] = made.turns_mean
    if made.step is not None:
        metrics["evaluation/step"] = float(made.step)
    for metric, value in found.items():
        if value is not None:
            metrics[metric] = value.mean
            if value.low is not None and value.high is not None:
                metrics |= {f"{metric}/low": value.low, f"{metric}/high": value.high}
    if made.set_name is None:
        return metrics
    return {f"evaluation/{made.set_name}/{metric.removeprefix('evaluation/')}": metrics[metric] for metric in metrics}


def versions_in_words(versions: tuple[int, int] | None, otherwise: str) -> str:
    if versions is None:
        return otherwise
    low, high = versions
    return f"policy version {low}" if low == high else f"policy versions {low} to {high}"


def _difference(made: Evaluation, other: Evaluation) -> Estimate | None:
    pairs = zip(made.rewards_P, other.rewards_P, strict=True)
    differences = [now - then for now, then in pairs if now is not None and then is not None]
    return of_means(np.array(differences)) if differences else None
