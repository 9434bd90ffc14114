"""Config of evaluations, by `slipstream evaluate run.toml` and during training."""

import re
from typing import Annotated, Self

import msgspec
import tyro

from learner.config.section import AtLeastOne, NotNegative, Section, Timeout, require
from protocol.config_keys import PASSED_ON, MayChange

SOURCES = ("task", "path", "dataset")
SET_NAME = re.compile(r"(?!function$|pass_at_)[a-z0-9][a-z0-9_]*")
"""Pattern of set names. The name precedes the metric, as in evaluation/hard/reward, so it must not look like
one."""


class SetConfig(Section):
    """One of several sets of prompts; [learner.evaluation] fills in unset keys."""

    task: MayChange[str | None] = None
    """Built-in task."""
    path: MayChange[str | None] = None
    """JSONL file."""
    dataset: MayChange[str | None] = None
    """`datasets` dataset."""
    dataset_config: MayChange[str | None] = None
    """Configuration of the dataset, if it has several."""
    split: MayChange[str | None] = None
    """Split of the dataset."""
    num_prompts: MayChange[int | None] = None
    """Maximum number of prompts, taken from the start."""
    num_samples: MayChange[int | None] = None
    """Number of completions, or episodes, per prompt."""
    temperature: MayChange[float | None] = None
    """Sampling temperature. 0: greedy."""
    max_tokens: MayChange[int | None] = None
    """Maximum number of tokens of a completion, or of a turn."""


class EvaluationConfig(Section):
    """Prompts and server of an evaluation.

    Prompts are tokenized, and answers scored, as in training.
    """

    every_steps: MayChange[NotNegative[int]] = 0
    """Steps between evaluations during training. One also follows the last step. 0: only by `slipstream
    evaluate`."""
    at_start: MayChange[bool] = False
    """Whether to also evaluate before the first step."""
    pin_policy: MayChange[bool] = False
    """Whether to hold the next step until the evaluation is complete, so that one policy version answers all
    prompts. Training waits meanwhile."""
    url: MayChange[str | None] = None
    """OpenAI endpoint of a server: one of this run, or for `slipstream evaluate` also of `vllm serve`. Its key,
    if it requires one, is read from EVALUATION_API_KEY or OPENAI_API_KEY. Unset: server.http_host and
    server.http_port, by default port 8000 of this machine. If http_host is all addresses (0.0.0.0, ::), the
    host of the run's first server is used."""
    task: MayChange[str | None] = None
    """Built-in task, as in learner.data. The prompts of reverse, sort, arithmetic and calculator are not those that
    the run trains on. At most one of task, path and dataset may be set. Unset: the run's own prompts, of which
    dataset_config and split may name another part."""
    path: MayChange[str | None] = None
    """JSONL file."""
    dataset: MayChange[str | None] = None
    """`datasets` dataset."""
    dataset_config: MayChange[str | None] = None
    """Configuration of the dataset, if it has several. Unset: that of learner.data, if the dataset is the same."""
    split: MayChange[str | None] = None
    """Split of the dataset. Unset: "test" of a dataset that is named here, or else that of learner.data."""
    num_prompts: MayChange[AtLeastOne[int] | None] = None
    """Maximum number of prompts, taken from the start."""
    num_samples: MayChange[AtLeastOne[int]] = 1
    """Number of completions, or episodes, per prompt. More than one requires a temperature above 0."""
    temperature: MayChange[float] = 0.0
    """Sampling temperature. 0: greedy."""
    max_tokens: MayChange[AtLeastOne[int] | None] = None
    """Maximum number of tokens of a completion, or of a turn. Unset: learner.sampling.max_tokens."""
    max_concurrent: MayChange[AtLeastOne[int]] = 64
    """Maximum number of prompts in flight."""
    timeout_s: MayChange[Timeout] = 600.0
    """Maximum time for an answer, and to wait for a lost server."""
    sets: MayChange[Annotated[dict[str, SetConfig], PASSED_ON, tyro.conf.Suppress]] = msgspec.field(
        default_factory=dict
    )
    """Several sets of prompts in place of the single one, each with a name of yours:
    [learner.evaluation.sets.NAME]."""

    def set_names(self) -> list[str | None]:
        """Return the names of the sets in evaluation order, or [None] for a single set."""
        return [*self.sets] or [None]

    def of_set(self, name: str | None) -> Self:
        """Return the config as if this set were the only one.

        Raises:
            ValueError: Keys of the set contradict each other.
        """
        if name is None:
            return self
        chosen = self.sets[name]
        own_keys = {key: value for key in chosen.__struct_fields__ if (value := getattr(chosen, key)) is not None}
        other_source = dict.fromkeys((*SOURCES, "dataset_config")) if own_keys.keys() & {*SOURCES} else {}
        return msgspec.structs.replace(self, sets={}, **(other_source | own_keys))

    def unmet_needs(self) -> dict[str, str]:
        return {} if self.every_steps else {"at_start": "every_steps", "pin_policy": "every_steps"}

    def check(self) -> None:
        sources = [f"{key} = {value!r}" for key in SOURCES if (value := getattr(self, key))]
        require(len(sources) <= 1, f"{' and '.join(sources)} are set; expected at most one of task, path and dataset")
        require(
            self.url is None or self.url.startswith(("http://", "https://")),
            f'url = {self.url!r} is not a URL of an OpenAI server; use one such as "http://127.0.0.1:8000/v1"',
        )
        require(0 <= self.temperature <= 2, f"temperature = {self.temperature} must be between 0 and 2")
        require(
            self.num_samples == 1 or self.temperature > 0,
            f"num_samples = {self.num_samples} with temperature = 0: all samples of a prompt would be equal; set "
            "temperature, or num_samples = 1",
        )
        for name in self.sets:
            require(
                SET_NAME.fullmatch(name) is not None,
                f"sets.{name} is not a valid name of a set; use a-z, 0-9 and _, but not function or pass_at_…, which "
                "are metrics",
            )
            try:
                self.of_set(name)
            except ValueError as error:
                raise ValueError(f"sets.{name}.{error}") from error
