"""The evaluation section of the learner's config: `learner evaluate run.toml`, and evaluations while a run trains."""

import math
import re
from typing import Annotated, Self

import msgspec
import tyro

from learner.config.section import Section, require
from protocol.config import PASSED_ON, MayChange

SOURCES = ("task", "path", "dataset")
SET_NAME = re.compile(r"(?!function$|pass_at_)[a-z0-9][a-z0-9_]*")
"""It stands where a metric of a single set has its own name: evaluation/hard/reward."""


class SetConfig(Section):
    """One of several sets of prompts. What it does not say, [learner.evaluation] says."""

    task: MayChange[str | None] = None
    """A built-in task."""
    path: MayChange[str | None] = None
    """A JSONL file."""
    dataset: MayChange[str | None] = None
    """A `datasets` dataset."""
    split: MayChange[str | None] = None
    """Which split of the dataset."""
    num_prompts: MayChange[int | None] = None
    """Use only the first so many prompts."""
    num_samples: MayChange[int | None] = None
    """Completions, or episodes, of each prompt."""
    temperature: MayChange[float | None] = None
    """0 is greedy."""
    max_tokens: MayChange[int | None] = None
    """Of a completion, or of a turn."""


class EvaluationConfig(Section):
    """What an evaluation asks, and whom. How prompts become tokens and what rates answers is as in training."""

    every_steps: MayChange[int] = 0
    """Evaluate while training goes on: after every so many steps and after the last. 0: only by `learner evaluate`."""
    at_start: MayChange[bool] = False
    """Evaluate before the first step too."""
    pin: MayChange[bool] = False
    """Hold the next step until all is answered, so that one policy version answers. Training waits for it."""
    url: MayChange[str | None] = None
    """The OpenAI side of a server: of this run's, or for `learner evaluate` also that of `vllm serve`. Its key, if it wants one, in the
    variable EVALUATION_API_KEY or OPENAI_API_KEY. Unset: at server.http_host and server.http_port, this machine's port 8000; where http_host is all addresses (0.0.0.0, ::), at
    the host of the run's first server."""
    task: MayChange[str | None] = None
    """A built-in task, as in learner.data. Of task, path and dataset at most one; without any the run's own prompts are asked."""
    path: MayChange[str | None] = None
    """A JSONL file."""
    dataset: MayChange[str | None] = None
    """A `datasets` dataset."""
    split: MayChange[str] = "test"
    """Which split of the dataset."""
    num_prompts: MayChange[int | None] = None
    """Use only the first so many prompts."""
    num_samples: MayChange[int] = 1
    """Completions, or episodes, of each prompt; more than one need a temperature."""
    temperature: MayChange[float] = 0.0
    """0 is greedy."""
    max_tokens: MayChange[int | None] = None
    """Of a completion, or of a turn. Unset: learner.sampling.max_tokens."""
    max_concurrent: MayChange[int] = 64
    """Prompts that are asked at once."""
    timeout_s: MayChange[float] = 600.0
    """How long an answer may take, and how long a server that is gone is waited for."""
    sets: MayChange[Annotated[dict[str, SetConfig], PASSED_ON, tyro.conf.Suppress]] = msgspec.field(
        default_factory=dict
    )
    """Several sets of prompts, each with a name of yours, in place of the one: [learner.evaluation.sets.NAME]."""

    def set_names(self) -> list[str | None]:
        """In the order in which they are asked; None is the only one, which has no name."""
        return [*self.sets] or [None]

    def of_set(self, name: str | None) -> Self:
        """As if this set were the only one. Raises ValueError for what contradicts in it."""
        if name is None:
            return self
        chosen = self.sets[name]
        said = {key: value for key in chosen.__struct_fields__ if (value := getattr(chosen, key)) is not None}
        other_source = dict.fromkeys(SOURCES) if said.keys() & {*SOURCES} else {}
        return msgspec.structs.replace(self, sets={}, **(other_source | said))

    def lacking(self) -> dict[str, str]:
        idle = {} if self.dataset else {"split": "dataset"}
        return idle if self.every_steps else idle | {"at_start": "every_steps", "pin": "every_steps"}

    def check(self) -> None:
        sources = [f"{key} = {value!r}" for key in SOURCES if (value := getattr(self, key))]
        require(len(sources) <= 1, f"{' and '.join(sources)} came; expected at most one of task, path and dataset")
        require(
            self.url is None or self.url.startswith(("http://", "https://")),
            f'url = {self.url!r} is no address of an OpenAI server; expected such as "http://127.0.0.1:8000/v1"',
        )
        require(self.every_steps >= 0, f"every_steps = {self.every_steps} must not be negative")
        for key in ("num_prompts", "num_samples", "max_tokens", "max_concurrent"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"{key} = {value} must be at least 1")
        require(0 <= self.temperature <= 2, f"temperature = {self.temperature} must lie between 0 and 2")
        require(
            self.num_samples == 1 or self.temperature > 0,
            f"num_samples = {self.num_samples} with temperature = 0: all would be the same; set temperature, or num_samples = 1",
        )
        require(0 < self.timeout_s < math.inf, f"timeout_s = {self.timeout_s} must be above 0 and finite")
        for name in self.sets:
            require(
                SET_NAME.fullmatch(name) is not None,
                f"sets.{name} came; expected a name of a-z, 0-9 and _, neither function nor pass_at_…, which are metrics",
            )
            try:
                self.of_set(name)
            except ValueError as error:
                raise ValueError(f"sets.{name}.{error}") from error
