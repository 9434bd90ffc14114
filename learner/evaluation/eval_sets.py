"""The questions of an evaluation: the prompts of each set in [learner.evaluation], read only once.

    [learner.evaluation] ─▶ prompts ─▶ EvalSet ─▶ evaluate.py

Invariant: two evaluations with equal digests used the same prompts, sampled in the same way and scored alike.
"""

import re
from collections.abc import Sequence

import msgspec
import xxhash

from learner.config import DataConfig, EvaluationConfig, LearnerRun
from learner.config.rewards import JUDGE
from learner.prompts.prompts import Prompts
from learner.rollouts.turns import EpisodePlayer
from learner.run_inputs import RunInputs
from protocol.errors import DataError

DEFAULT_SPLIT = "test"
DATA_KEYS = ("task", "path", "dataset", "dataset_config", "split", "num_prompts")
"""Keys of learner.data that an evaluation may have too."""


class EvalSet:
    """Questions of one set. Raises DataError."""

    def __init__(self, run_inputs: RunInputs, set_name: str | None = None) -> None:
        run = run_inputs.run
        self.run, self.tokenizer, self.set_name = run, run_inputs.tokenizer, set_name
        self.config, self.url = run.learner.evaluation.of_set(set_name), run.evaluation_url
        data = run.learner.data
        trained = None if self.config.task is None else data  # without a task, the set may be the run's own prompts
        try:
            self.source = run_inputs.prompts_of(evaluated_data(self.config, data), trained)
        except DataError as error:
            raise DataError(_with_own_keys(str(error), run.learner.evaluation, set_name)) from error
        self.name = self.source.name
        self.prompts = [self.source.prompt_at(i) for i in range(len(self.source))]
        self.digest = _digest(run, self.config, self.source)
        self.player: EpisodePlayer | None = None
        """Player of the episodes. None: the set has only completions (episodes.py)."""


def sets_of(run_inputs: RunInputs) -> list[EvalSet]:
    """Return the sets of a run in evaluation order; the default set has no name."""
    return [EvalSet(run_inputs, name) for name in run_inputs.run.learner.evaluation.set_names()]


def digest_of(sets: Sequence[EvalSet]) -> str:
    return "+".join(eval_set.digest for eval_set in sets)


def evaluated_data(config: EvaluationConfig, data: DataConfig) -> DataConfig:
    """Return the data config of a set, or the run's own if the set names no data.

    Not shuffled, because each prompt is used once. A set may name another part of the run's dataset or task,
    which is read in the same way.
    """
    has_source = _has_source(config)
    is_part = data.dataset is not None and (config.split is not None or config.dataset_config is not None)
    if not has_source and not is_part:
        return msgspec.structs.replace(data, shuffle=False, num_prompts=config.num_prompts or data.num_prompts)
    dataset = config.dataset if has_source else data.dataset
    is_same_dataset = dataset is not None and dataset == data.dataset
    chosen = msgspec.structs.replace(
        data, shuffle=False, num_prompts=config.num_prompts, task=config.task, path=config.path, dataset=dataset,
        split=config.split or (DEFAULT_SPLIT if has_source else data.split),
        revision=data.revision if is_same_dataset else None,
        dataset_config=config.dataset_config or (data.dataset_config if is_same_dataset else None),
        num_digits=data.num_digits if config.task == data.task else None,
    )  # fmt: skip
    return chosen.in_effect()


def _with_own_keys(message: str, evaluation: EvaluationConfig, set_name: str | None) -> str:
    """Return an error message about learner.data with the names that its keys have in this set."""
    chosen, of_set = evaluation.of_set(set_name), evaluation.sets.get(set_name or "", evaluation)
    own = DATA_KEYS if _has_source(chosen) else [key for key in DATA_KEYS if getattr(chosen, key) is not None]
    for key in own:
        is_inherited = getattr(of_set, key) is None and getattr(evaluation, key) is not None
        section = "learner.evaluation" + (f".sets.{set_name}" if set_name and not is_inherited else "")
        message = re.sub(rf"\blearner\.data\.{key}\b", f"{section}.{key}", message)
    return message


def _has_source(config: EvaluationConfig) -> bool:
    return config.task is not None or config.path is not None or config.dataset is not None


def _digest(run: LearnerRun, config: EvaluationConfig, prompts: Prompts) -> str:
    sampling, reward = run.learner.sampling, run.learner.reward
    max_tokens = config.max_tokens or sampling.max_tokens
    how: tuple[object, ...] = (
        config.num_samples, config.temperature, max_tokens, sampling.stop, reward.functions, reward.function_weights,
        reward.on_none, reward.skip_special_tokens,
    )  # fmt: skip
    if JUDGE in reward.functions:
        how += (msgspec.structs.replace(reward.judge, url=None),)  # the same judge may move
    if (environment := run.learner.environment).is_used:
        how += (
            environment.named, environment.max_turns, environment.max_episode_tokens, environment.tool_call_format,
        )  # fmt: skip
    return xxhash.xxh64(prompts.digests.tobytes() + repr(how).encode()).hexdigest()
