"""The evaluation section of the learner's config: `learner evaluate run.toml`, and evaluations while a run trains."""

import math

from learner.config.section import Section, require
from protocol.config import MayChange


class EvaluationConfig(Section):
    """What an evaluation asks, and whom. How prompts become tokens and what rates answers is as in training."""

    every_steps: MayChange[int] = 0
    """Evaluate while training goes on: after every so many steps and after the last. 0: only by `learner evaluate`."""
    at_start: MayChange[bool] = False
    """Evaluate before the first step too."""
    pin: MayChange[bool] = False
    """Hold the next push until all is answered, so that one policy version answers. Training may wait for it."""
    url: MayChange[str] = "http://127.0.0.1:8000/v1"
    """The OpenAI side of a server: Slipstream's or `vllm serve`. Its key, if it wants one, in the variable OPENAI_API_KEY."""
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
    """Completions of each prompt; more than one need a temperature."""
    temperature: MayChange[float] = 0.0
    """0 is greedy."""
    max_tokens: MayChange[int | None] = None
    """Of a completion. Unset: learner.sampling.max_tokens."""
    max_concurrent: MayChange[int] = 64
    """Prompts that are asked at once."""
    timeout_s: MayChange[float] = 600.0
    """How long an answer may take, and how long a server that is gone is waited for."""

    def lacking(self) -> dict[str, str]:
        idle = {} if self.dataset else {"split": "dataset"}
        return idle if self.every_steps else idle | {"at_start": "every_steps", "pin": "every_steps"}

    def check(self) -> None:
        sources = [f"{key} = {value!r}" for key in ("task", "path", "dataset") if (value := getattr(self, key))]
        require(len(sources) <= 1, f"{' and '.join(sources)} came; expected at most one of task, path and dataset")
        require(
            self.url.startswith(("http://", "https://")),
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
