"""Where the prompts come from, and which are asked how often."""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from learner.config.section import Section, require
from protocol.config import MayChange

MIN_WEIGHT = 0.01


class CurriculumConfig(Section):
    """Which prompts are asked how often."""

    kind: Literal["none", "pass_rate"] = "none"
    """none: every prompt once per data epoch; pass_rate: those that are mostly solved or mostly failed less often."""
    reward: MayChange[str | None] = None
    """Name of the reward function whose mean over a group, from 0 to 1, is its pass rate. Unset: the first."""
    easy_above: float = 0.75
    """A prompt with a higher pass rate is easy."""
    hard_below: float = 0.25
    """A prompt with a lower pass rate is hard."""
    easy_weight: MayChange[float] = 0.2
    """Share of the data epochs in which an easy prompt is asked; others, and those not seen yet: 1."""
    hard_weight: MayChange[float] = 0.2
    """The same for a hard prompt."""
    drop_above: MayChange[float | None] = None
    """A prompt with this pass rate or a higher one is not asked again."""
    drop_below: MayChange[float | None] = None
    """A prompt with this pass rate or a lower one is not asked again."""
    decay: float = 0.5
    """A prompt's pass rate is decay · its old one + (1 - decay) · that of its newest group; 0: the newest alone."""

    def lacking(self) -> dict[str, str]:
        if self.kind == "none":
            return {key: 'kind = "pass_rate"' for key in self.__struct_fields__ if key != "kind"}
        if (self.easy_weight, self.hard_weight, self.drop_above, self.drop_below) == (1, 1, None, None):
            return {"kind": "easy_weight or hard_weight below 1, drop_above or drop_below"}
        return {}

    def check(self) -> None:
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


class DataConfig(Section):
    """Where the prompts come from: exactly one of task, path and dataset."""

    task: str | None = None
    """A built-in task: reverse, sort or arithmetic for `tiny:digits`; guess or calculator, for the environment of that name; sums or
    sums_held_out, products or products_held_out, which share no prompt, for a pretrained model."""
    path: MayChange[str | None] = None
    """A JSONL file, one prompt with its columns per line."""
    dataset: MayChange[str | None] = None
    """A `datasets` dataset: a hub name, or a local path written by save_to_disk or holding data files."""
    revision: MayChange[str | None] = None
    """Which revision of a hub dataset: a commit, tag or branch. Pin a commit, for a resume refuses other data than the run's."""
    dataset_config: str | None = None
    """Which configuration of the dataset, where it has several."""
    split: str = "train"
    """Which split of the dataset."""
    num_prompts: MayChange[int | None] = None
    """Use only the first so many prompts; for a task: make so many (default 4096). A resume may change it, path, dataset and
    revision only where the prompts stay the same."""
    num_digits: int | None = None
    """Digits of each number of a task's prompt: reverse (8), sort (4), arithmetic and calculator (2)."""
    prompt_column: str = "prompt"
    """The column with the prompt: a text, or a list of messages with role and content. All others go to the rewards."""
    system_prompt: str | None = None
    """Put before every prompt; turns a plain prompt into a conversation. Empty: a conversation without system message."""
    chat_template_kwargs: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Given to the chat template, as in `chat_template_kwargs = {enable_thinking = false}`."""
    max_prompt_tokens: MayChange[int | None] = None
    """What becomes of a longer prompt, too_long says. Unset: a prompt for which the server's context has no room beside
    max_tokens is an error."""
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    """A prompt above max_prompt_tokens is an error, or left out, or asked without its first tokens (the reward functions see all
    of it). How many are, is said at the start and in the report."""
    num_workers: MayChange[int] = 1
    """Processes that encode a file or dataset, the first time that it is read; later starts find the result in the cache of
    `datasets` (HF_DATASETS_CACHE)."""
    shuffle: bool = True
    """Go through the prompts in a new order in every data epoch."""

    def lacking(self) -> dict[str, str]:
        lacking = {} if self.task else {"num_digits": "task"}
        if not self.dataset:
            lacking |= dict.fromkeys(("dataset_config", "split", "revision"), "dataset")
        return lacking if self.path or self.dataset else lacking | {"num_workers": "path or dataset"}

    def check(self) -> None:
        sources = {key: value for key in ("task", "path", "dataset") if (value := getattr(self, key)) is not None}
        require(bool(sources), "task, path or dataset must be given")
        require(
            len(sources) == 1,
            f"{', '.join(f'{key} = {value!r}' for key, value in sources.items())} came; expected exactly one of task, path "
            "and dataset",
        )
        require(
            self.too_long == "refuse" or self.max_prompt_tokens is not None,
            f'too_long = "{self.too_long}" needs max_prompt_tokens: which prompts are asked must not depend on the server',
        )
        for key in ("num_prompts", "num_digits", "max_prompt_tokens", "num_workers"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"{key} = {value} must be at least 1")
