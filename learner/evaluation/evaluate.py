"""`learner evaluate`: how good the policy of a server is, with intervals, and how much better than at the evaluation before.

    [learner.evaluation] ─▶ prompts ─▶ asking.py ─▶ rewards, as in training ─▶ estimates.py ─▶ Evaluation ─▶ RUN_DIR/evaluations.jsonl

Beside the training loop: it asks the OpenAI side of a server, so that training goes on and a checkpoint in `vllm serve` will do. Invariant:
two evaluations are compared only if they asked the same prompts in the same way.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from learner.config import DataConfig, LearnerRun
from learner.evaluation.asking import Answered, ask_all
from learner.evaluation.estimates import Estimate, estimate, of_majority, of_means, pass_at, problem_means
from learner.material import Material
from learner.prompts.prompts import Prompt, Prompts
from learner.report.lines import Lines, whole_lines
from learner.rewards.workers import GroupRewards, RewardWorkers
from protocol.errors import ConfigError, RewardError

FILE = "evaluations.jsonl"
SCORING_S = 60.0
"""For a group, beside the deadlines of its reward functions."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A line of evaluations.jsonl."""

    time: float
    """Seconds since 1970."""
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
    difference: Estimate | None = None
    """To the evaluation before that asked the same, prompt by prompt."""
    before: tuple[int, int] | None = None
    """The versions of that one."""


def evaluate(run: LearnerRun) -> Evaluation:
    """Ask, rate, compare and note. Raises SlipstreamError."""
    if run.learner.environment.is_used:
        raise ConfigError(
            f"{run.learner.environment.named}: episodes are not evaluated yet; evaluate a run whose rewards rate completions"
        )
    started = time.monotonic()
    material = Material(run)
    prompts = Prompts(evaluated_data(run), material.tokenizer, run.seed)
    asked = [prompts.prompt_at(place) for place in range(len(prompts))]
    # Functions that cannot be loaded are told before the server has worked for nothing.
    with RewardWorkers(run.learner.reward) as workers:
        model, answers = asyncio.run(ask_all(run, asked))
        rewards = rate(material, workers, asked, answers)
    path = Path(run.run_dir) / FILE
    made = summed_up(run, prompts, model, answers, rewards)
    made = msgspec.structs.replace(made, seconds=time.monotonic() - started)
    made = compared(made, earlier(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = Lines(path)
    lines.append(msgspec.to_builtins(made))
    lines.close()
    return made


def evaluated_data(run: LearnerRun) -> DataConfig:
    """Of [learner.evaluation], or the run's own. Not shuffled: each prompt is asked once. Of the run's own dataset or task another part
    may be asked, which is read in the same way.
    """
    config, data = run.learner.evaluation, run.learner.data
    if config.task is None and config.path is None and config.dataset is None:
        return msgspec.structs.replace(data, shuffle=False, num_prompts=config.num_prompts or data.num_prompts)
    is_same_dataset = config.dataset is not None and config.dataset == data.dataset
    chosen = msgspec.structs.replace(
        data, shuffle=False, num_prompts=config.num_prompts, task=config.task, path=config.path, dataset=config.dataset,
        split=config.split, revision=data.revision if is_same_dataset else None,
        dataset_config=data.dataset_config if is_same_dataset else None,
        num_digits=data.num_digits if config.task == data.task else None,
    )  # fmt: skip
    return chosen.in_effect()


def rate(
    material: Material, workers: RewardWorkers, prompts: Sequence[Prompt], answers: Sequence[Answered]
) -> list[GroupRewards]:
    """What the reward functions say of each. Raises RewardError for one that fails."""
    config, tokenizer = material.run.learner.reward, material.tokenizer
    futures = []
    for prompt, answered in zip(prompts, answers, strict=True):
        if answered.token_ids_K is None:
            texts_K, ids_K = (
                answered.texts_K,
                [tokenizer.encode(text, add_special_tokens=False) for text in answered.texts_K],
            )
        else:  # as in training, where the tokens are what comes
            ids_K = answered.token_ids_K
            texts_K = tokenizer.batch_decode(ids_K, skip_special_tokens=config.skip_special_tokens)
        futures.append(workers.submit(prompt, texts_K, ids_K))
    limit_s = SCORING_S + len(futures) * len(config.functions) * config.timeout_s
    rewards = [future.result(limit_s) for future in futures]
    for function in (function for group in rewards for function in group.functions):
        if function.message is not None:
            raise RewardError(function.message)
    return rewards


def summed_up(
    run: LearnerRun, prompts: Prompts, model: str, answers: Sequence[Answered], rewards: Sequence[GroupRewards]
) -> Evaluation:
    config = run.learner.evaluation
    values_PK = _table(group.rewards for group in rewards)
    by_name = {
        name: _table(group.functions[place].rewards for group in rewards)
        for place, name in enumerate(run.learner.reward.names)
    }
    is_finished_PK = np.array([answered.is_finished_K for answered in answers])
    versions = [answered.versions for answered in answers if answered.versions is not None]
    texts_PK = [answered.texts_K for answered in answers]
    return Evaluation(
        time=time.time(),
        data=prompts.name,
        asked=_digest(run, prompts),
        url=config.url,
        model=model,
        versions=(min(low for low, _ in versions), max(high for _, high in versions)) if versions else None,
        num_prompts=len(prompts),
        num_samples=config.num_samples,
        temperature=config.temperature,
        seconds=0.0,
        reward=estimate(values_PK),
        functions={name: estimate(table) for name, table in by_name.items()},
        pass_at={
            name: {str(k): _estimated(pass_at(k, table == 1)) for k in _powers(config.num_samples)}
            for name, table in by_name.items()
            if config.num_samples > 1 and set(np.unique(table)) <= {0.0, 1.0}
        },
        majority=estimate(of_majority(texts_PK, values_PK)[:, None]) if config.num_samples > 2 else None,
        reward_finished=estimate(np.where(is_finished_PK, values_PK, np.nan)),
        truncated_frac=float(1 - is_finished_PK.mean()),
        length_mean=sum(answered.num_tokens for answered in answers) / is_finished_PK.size,
        rewards_P=[None if np.isnan(mean) else float(mean) for mean in problem_means(values_PK)],
    )


def compared(made: Evaluation, before: Sequence[Evaluation]) -> Evaluation:
    """With the difference to the newest that asked the same, over the prompts that both could score."""
    alike = [one for one in before if one.asked == made.asked]
    if not alike:
        return made
    pairs = zip(made.rewards_P, alike[-1].rewards_P, strict=True)
    differences = [now - then for now, then in pairs if now is not None and then is not None]
    if not differences:
        return made
    return msgspec.structs.replace(made, difference=of_means(np.array(differences)), before=alike[-1].versions)


def earlier(path: Path) -> list[Evaluation]:
    """What was noted so far. Raises ConfigError for a file that holds something else."""
    if not path.is_file():
        return []
    try:
        whole = path.read_bytes()[: whole_lines(path)]
        return [msgspec.json.decode(line, type=Evaluation) for line in whole.splitlines()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} holds a line that is no evaluation ({error}); move it away") from error


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
    lines = [
        f"{made.num_prompts:,} prompts of {made.data}, {sampled}, by {_versions(made.versions, made.model)}, {made.seconds:.1f} s"
    ]
    lines += [f"  {name:{width}}  {'–' if value is None else value}" for name, value in rows]
    lines.append(f"  {made.truncated_frac:.1%} cut off, {made.length_mean:,.0f} tokens on average; intervals of 95 %")
    if made.difference is not None:
        lines.append(
            f"  {made.difference} more than {_versions(made.before, 'the evaluation before')}, prompt by prompt"
        )
    return "\n".join(lines)


def _versions(versions: tuple[int, int] | None, otherwise: str) -> str:
    if versions is None:
        return otherwise
    low, high = versions
    return f"policy version {low}" if low == high else f"policy versions {low} to {high}"


def _table(rows: Iterable[list[float | None]]) -> np.ndarray:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], float)


def _estimated(values_P: np.ndarray) -> Estimate:
    found = estimate(values_P[:, None])
    assert found is not None
    return found


def _powers(most: int) -> list[int]:
    """1, 2, 4, … and the most itself."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def _digest(run: LearnerRun, prompts: Prompts) -> str:
    config, sampling, reward = run.learner.evaluation, run.learner.sampling, run.learner.reward
    max_tokens = config.max_tokens or sampling.max_tokens
    how = (config.num_samples, config.temperature, max_tokens, sampling.stop, reward.names, reward.function_weights)
    return xxhash.xxh64(prompts.digests.tobytes() + repr(how).encode()).hexdigest()
