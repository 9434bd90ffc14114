"""Results of an evaluation: means with confidence intervals, compared with earlier evaluations.

    answers, rewards (evaluate.py) ─▶ Estimate ─▶ Evaluation ─▶ RUN_DIR/evaluations.jsonl ─▶ console, report

Samples of one problem are correlated, so the interval is that of the problem means.
Invariant: two evaluations are compared only if they used the same prompts and sampling. An evaluation
whose weights a resume has discarded is never compared.

Suffixes: P problems, K samples of each. NaN marks a missing value.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np

from learner.rewards.builtin.answers import short_answer
from learner.storage.files import JsonLinesFile, replace_file, whole_lines
from protocol.endpoint import NO_VERSION
from protocol.errors import ConfigError

LEVEL = 0.95
FILE = "evaluations.jsonl"


class Estimate(msgspec.Struct, frozen=True):
    """Mean with its 95% interval, for example mean=0.51, low=0.47, high=0.55.

    Values that are not binary have no interval if there is only one problem or if they are all equal.
    """

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f"  [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.mean:.4g}{interval}"


def estimate(values_PK: np.ndarray) -> Estimate | None:
    """Estimate the mean over problems that have a value; None if none has."""
    means_P = problem_means(values_PK)
    means_P = means_P[~np.isnan(means_P)]
    if not len(means_P):
        return None
    # Also if samples of a problem never differ: their deviation of 0 would claim certainty.
    if is_binary(values_PK) and is_binary(means_P):
        return wilson(float(means_P.sum()), len(means_P))
    return mean_estimate(means_P)


def is_binary(values: np.ndarray) -> bool:
    """Return whether all values are 0 or 1, apart from NaN."""
    return set(np.unique(values[~np.isnan(values)])) <= {0.0, 1.0}


def problem_means(values_PK: np.ndarray) -> np.ndarray:
    """Return each problem's mean over the samples with a value; NaN if there is none."""
    counts_P = (~np.isnan(values_PK)).sum(axis=1)
    sums_P = np.nansum(values_PK, axis=1)
    return np.divide(sums_P, counts_P, out=np.full(len(values_PK), np.nan), where=counts_P > 0)


def wilson(num_right: float, count: int) -> Estimate:
    """Return the Wilson interval of a share (Wilson, 1927, JASA 22: 209-212).

    It contains the shares p with |num_right/count - p| ≤ z √(p(1-p)/count).
    """
    z, share = NormalDist().inv_cdf((1 + LEVEL) / 2), num_right / count
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return Estimate(share, max(0.0, center - half), min(1.0, center + half))


def mean_estimate(values_P: np.ndarray) -> Estimate:
    """Return Student's t interval of the mean of independent values.

    The values are the problems' means or their differences. Equal values have no interval, because they do
    not show how far others may lie.
    """
    mean, count = float(values_P.mean()), len(values_P)
    deviation = float(values_P.std(ddof=1)) if count > 1 else 0.0
    if deviation == 0:
        return Estimate(mean)
    half = t_quantile(count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half)


def t_quantile(num_free: int) -> float:
    """Return the quantile of Student's t distribution at (1 + LEVEL) / 2.

    It is exact for 1 and 2 degrees of freedom, and otherwise follows Abramowitz and Stegun 26.7.5.
    """
    p = (1 + LEVEL) / 2
    if num_free == 1:
        return math.tan(math.pi * (p - 0.5))
    if num_free == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, n = NormalDist().inv_cdf(p), num_free
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return z + sum(terms)


def pass_at(k: int, values_PK: np.ndarray) -> np.ndarray:
    """Return for each problem the probability that one of k samples is right.

    The estimate is unbiased: 1 - C(K-c, k) / C(K, k) (arXiv 2107.03374, eq. 1). K is the number of samples
    with a value, and c the number of right ones. NaN if K is below k.
    """
    num_rated_P, num_right_P = (~np.isnan(values_PK)).sum(axis=1), (values_PK == 1).sum(axis=1)
    return np.array(
        [
            1 - math.comb(rated - right, k) / math.comb(rated, k) if rated >= k else math.nan
            for rated, right in zip(num_rated_P.tolist(), num_right_P.tolist(), strict=True)
        ]
    )


def majority_values(texts_PK: list[list[str]], values_PK: np.ndarray) -> np.ndarray:
    """Return for each problem the value of its most frequent answer.

    Texts with equal short answers count as equal, whatever their reasoning. If several answers are the most
    frequent, the first one counts. Texts without an answer, such as reasoning that never ends, have no vote,
    unless all are.
    """
    majority_P = []
    for texts, values in zip(texts_PK, values_PK, strict=True):
        answers = [short_answer(text) for text in texts]
        votes = [answer for answer in answers if answer] or answers
        majority_P.append(values[answers.index(max(votes, key=votes.count))])
    return np.array(majority_P)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Line of evaluations.jsonl."""

    time: float
    """Seconds since 1970."""
    step: int | None = None
    """Step after which a run started the evaluation. None: `slipstream evaluate` did."""
    set_name: str | None = None
    """Name of the set in learner.evaluation.sets. None: the default set."""
    data: str
    questions_digest: str = msgspec.field(name="asked")
    """Digest of the prompts and the sampling. Evaluations with equal digests are comparable."""
    url: str
    model: str
    versions: tuple[int, int] | None
    """Oldest and newest version that sampled a token, NO_VERSION for weights that no run has updated.

    None: the server does not report them.
    """
    num_prompts: int
    num_samples: int
    temperature: float
    seconds: float
    reward: Estimate | None
    """Mean reward. None: nothing could be scored."""
    functions: dict[str, Estimate | None]
    pass_at: dict[str, dict[str, Estimate]]
    """Share of prompts with a right answer among k samples, by binary reward function, then by k."""
    majority: Estimate | None
    """Mean reward of each prompt's most frequent answer, with more than two samples."""
    reward_finished: Estimate | None
    """Mean reward of the completions that ended on their own, not at a limit of tokens or turns."""
    truncated_frac: float
    """Share of the completions that ended at a limit of tokens."""
    length_mean: float
    """Mean number of tokens."""
    rewards_P: list[float | None]
    """Mean reward of each prompt."""
    ends: dict[str, int] = {}
    """Number of episodes by end state. silent: the policy sampled nothing in it."""
    turns_mean: float | None = None
    """Mean number of turns, of episodes."""
    difference: Estimate | None = None
    """Difference to the previous comparable evaluation, prompt by prompt."""
    before: tuple[int, int] | None = None
    """Versions of the previous comparable evaluation."""
    difference_to_first: Estimate | None = None
    """Difference to the first comparable evaluation, unless that is the previous one."""


def record_evaluation(path: Path, made: Evaluation) -> Evaluation:
    """Append an evaluation, compared with the earlier ones.

    Raises:
        ConfigError: The file has other content.
        DiskError: The file cannot be written.
    """
    made = compared(made, earlier(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = JsonLinesFile(path)
    try:
        lines.append(msgspec.to_builtins(made))
    finally:
        lines.close()
    return made


def compared(made: Evaluation, before: Sequence[Evaluation]) -> Evaluation:
    """Add the differences to the previous and the first comparable evaluation.

    They cover the prompts that both could score.
    """
    alike = [one for one in before if one.questions_digest == made.questions_digest]
    if not alike:
        return made
    return msgspec.structs.replace(
        made,
        difference=_difference(made, alike[-1]),
        before=alike[-1].versions,
        difference_to_first=_difference(made, alike[0]) if len(alike) > 1 else None,
    )


def earlier(path: Path) -> list[Evaluation]:
    """Return the recorded evaluations. Raises ConfigError for other content."""
    if not path.is_file():
        return []
    try:
        whole = path.read_bytes()[: whole_lines(path)]
        return [msgspec.json.decode(line, type=Evaluation) for line in whole.splitlines()]
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} contains a line that is not an evaluation ({error}); move the file to another directory"
        ) from error


def remove_later(path: Path, step: int) -> None:
    """Remove the evaluations of steps after `step`, from which a run resumes.

    These steps will run again, with other weights.

    Raises:
        ConfigError: The file has other content.
        DiskError: The file cannot be written.
    """
    recorded = earlier(path)
    left = [one for one in recorded if one.step is None or one.step <= step]
    if len(left) < len(recorded):
        replace_file(path, b"".join(msgspec.json.encode(one) + b"\n" for one in left))


def format_evaluation(made: Evaluation) -> str:
    """Format an evaluation for the console."""
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
        f"{set_name}{made.num_prompts:,} prompts of {made.data}, {sampled}, by "
        f"{describe_versions(made.versions, made.model)}, {made.seconds:.1f} s"
    ]
    lines += [f"  {name:{width}}  {'–' if value is None else value}" for name, value in rows]
    lines.append(f"  {made.truncated_frac:.1%} truncated, {made.length_mean:,.0f} tokens on average; 95 % intervals")
    if made.turns_mean is not None:
        ends = ", ".join(f"{count:,} {state}" for state, count in made.ends.items() if count)
        lines.append(f"  episodes ended: {ends}; {made.turns_mean:.1f} turns on average")
    if made.difference is not None:
        before = describe_versions(made.before, "the previous evaluation")
        lines.append(f"  difference to {before}: {made.difference} (paired by prompt)")
    if made.difference_to_first is not None:
        lines.append(f"  difference to the first evaluation: {made.difference_to_first} (paired by prompt)")
    return "\n".join(lines)


def summarize(made: Evaluation) -> str:
    """Format an evaluation as one log line."""
    of_set = f" of {made.set_name}" if made.set_name else ""
    parts = [f"evaluation{of_set} after step {made.step}: reward {'–' if made.reward is None else made.reward}"]
    if made.difference is not None:
        parts.append(f"difference to the previous one {made.difference}")
    who = describe_versions(made.versions, made.model)
    return "; ".join([*parts, f"{made.num_prompts:,} prompts by {who} in {made.seconds:.1f} s"])


def metrics_of(made: Evaluation) -> dict[str, float]:
    """Return a metric for each estimate, and for the ends of its interval.

    The metrics of a named set have its name: evaluation/hard/reward.
    """
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


def describe_versions(versions: tuple[int, int] | None, otherwise: str) -> str:
    """Name the policy versions, or return `otherwise` for weights that no run has updated."""
    if versions is None or versions[1] == NO_VERSION:
        return otherwise
    low, high = versions
    return f"policy version {low}" if low == high else f"policy versions {low} to {high}"


def _difference(made: Evaluation, other: Evaluation) -> Estimate | None:
    pairs = zip(made.rewards_P, other.rewards_P, strict=True)
    differences = [now - then for now, then in pairs if now is not None and then is not None]
    return mean_estimate(np.array(differences)) if differences else None
