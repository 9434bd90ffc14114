"""Where the prompts come from, and which are asked how often."""

from typing import Literal

import msgspec

from learner.config.section import Section, require
from protocol.errors import ConfigError

MIN_WEIGHT = 0.01


class CurriculumConfig(Section):
    """Which prompts are asked how often."""

    kind: Literal["none", "pass_rate"] = "none"
    """none: every prompt once per data epoch; pass_rate: those that are mostly solved or mostly failed less often."""
    reward: str | None = None
    """Name of the reward function whose mean over a group, from 0 to 1, is its pass rate. Unset: the first."""
    easy_above: float = 0.75
    """A prompt with a higher pass rate is easy."""
    hard_below: float = 0.25
    """A prompt with a lower pass rate is hard."""
    easy_weight: float = 0.2
    """Share of the data epochs in which an easy prompt is asked; others, and those not seen yet: 1."""
    hard_weight: float = 0.2
    """The same for a hard prompt."""
    drop_above: float | None = None
    """A prompt with this pass rate or a higher one is not asked again."""
    drop_below: float | None = None
    """A prompt with this pass rate or a lower one is not asked again."""
    decay: float = 0.5
    """A prompt's pass rate is decay · its old one + (1 - decay) · that of its newest group; 0: the newest alone."""

    def __post_init__(self) -> None:
        if self.kind == "none":
            for key, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
                value = getattr(self, key)
                require(value == default, f'{key} = {value!r} does nothing with kind = "none"; set kind = "pass_rate"')
        require(
            0 <= self.hard_below <= self.easy_above <= 1,
            f"hard_below = {self.hard_below}, easy_above = {self.easy_above}: expected 0 <= hard_below <= easy_above <= 1",
        )
        for key in ("easy_weight", "hard_weight"):
            value = getattr(self, key)
            require(value == 0 or MIN_WEIGHT <= value <= 1, f"{key} = {value} must be 0, or from {MIN_WEIGHT} to 1")
        require(
            self.drop_above is None or self.easy_above < self.drop_above <= 1,
            f"drop_above = {self.drop_above} must lie above easy_above = {self.easy_above} and be at most 1",
        )
        require(
            self.drop_below is None or 0 <= self.drop_below < self.hard_below,
            f"drop_below = {self.drop_below} must be at least 0 and lie below hard_below = {self.hard_below}",
        )
        require(0 <= self.decay < 1, f"decay = {self.decay} must be at least 0 and below 1")
        gates = (self.drop_above, self.drop_below)
        require(
            self.kind == "none" or (self.easy_weight, self.hard_weight) != (1, 1) or gates != (None, None),
            'kind = "pass_rate" with easy_weight = hard_weight = 1 and without drop_above and drop_below asks every prompt '
            'as kind = "none" does; lower a weight, or set kind = "none"',
        )

    def weight(self, pass_rate: float | None) -> float:
        """Return the probability with which a prompt of this pass rate is kept; None: not seen yet."""
        if pass_rate is None:
            return 1.0
        if self.drop_above is not None and pass_rate >= self.drop_above:
            return 0.0
        if self.drop_below is not None and pass_rate <= self.drop_below:
            return 0.0
        return (
            self.easy_weight
            if pass_rate > self.easy_above
            else self.hard_weight
            if pass_rate < self.hard_below
            else 1.0
        )


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the prompts come from: exactly one of task, path and dataset."""

    task: str | None = None
    """A built-in task: reverse, sort or arithmetic (sums)."""
    path: str | None = None
    """A JSONL file, one prompt with its columns per line."""
    dataset: str | None = None
    """A `datasets` dataset: a hub name, or a local path written by save_to_disk or holding data files."""
    dataset_config: str | None = None
    """Which configuration of the dataset, where it has several."""
    split: str = "train"
    """Which split of the dataset."""
    num_prompts: int | None = None
    """Use only the first so many prompts; for a task: make so many (default 4096)."""
    num_digits: int | None = None
    """Digits of each number of a task's prompt: reverse (8), sort (4), arithmetic (2)."""
    prompt_column: str = "prompt"
    """The column with the prompt: a text, or a list of messages with role and content. All others go to the rewards."""
    system_prompt: str | None = None
    """Put before every prompt; turns a plain prompt into a conversation. Empty: a conversation without system message."""
    max_prompt_tokens: int | None = None
    """A longer prompt is an error. Unset: what the server's context leaves beside max_tokens."""
    shuffle: bool = True
    """Go through the prompts in a new order in every data epoch."""

    def __post_init__(self) -> None:
        sources = {"task": self.task, "path": self.path, "dataset": self.dataset}
        if sum(value is not None for value in sources.values()) != 1:
            given = ", ".join(f"learner.data.{key} = {value!r}" for key, value in sources.items() if value is not None)
            raise ConfigError(
                f"{given or 'none of learner.data.task, learner.data.path and learner.data.dataset'} came; "
                "expected exactly one of task, path and dataset"
            )
        for key in ("num_prompts", "num_digits", "max_prompt_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"learner.data.{key} = {value} must be at least 1")
        if self.num_digits is not None and self.task is None:
            raise ConfigError(f"learner.data.num_digits = {self.num_digits} does nothing without learner.data.task")
