"""Config of the optimizer, and of the supervised warm start before it."""

from typing import Literal

from learner.config.section import Section, require
from protocol.config_keys import MayChange


class WarmStartConfig(Section):
    """Supervised training on the data's answers before the first step.

    For a model that would otherwise never be rewarded.
    """

    steps: int = 0
    """Optimizer steps on answers. 0: no warm start."""
    learning_rate: float = 1e-5
    """Learning rate of AdamW. Its other settings are those of learner.optimizer. The optimizer of the run
    starts fresh."""
    rows_per_step: int = 32
    """Rows of data per optimizer step, over all ranks."""
    answer_column: str = "answer"
    """Column with the text to learn. The end-of-sequence token is appended."""

    def unmet_needs(self) -> dict[str, str]:
        others = ("learning_rate", "rows_per_step", "answer_column")
        return dict.fromkeys(others, "steps above 0") if self.steps == 0 else {}

    def check(self) -> None:
        require(self.steps >= 0, f"steps = {self.steps} must not be negative")
        require(self.learning_rate > 0, f"learning_rate = {self.learning_rate} must be above 0")
        require(self.rows_per_step >= 1, f"rows_per_step = {self.rows_per_step} must be at least 1")


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer. adamw: AdamW; adamw_8bit: AdamW with 8-bit moments by bitsandbytes (`[adamw-8bit]`), at a
    quarter of their memory, not under FSDP."""
    learning_rate: MayChange[float] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its peak. It is above 0 from the first step on, so no step
    is wasted."""
    beta1: float = 0.9
    """First-moment decay of AdamW."""
    beta2: float = 0.95
    """Second-moment decay of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of AdamW, for matrices only. Norms, biases and embeddings have none."""
    max_grad_norm: float = 1.0
    """Maximum norm of the gradient. Larger gradients are clipped to it."""
    max_skipped_updates: MayChange[int] = 5
    """Maximum number of consecutive skipped updates, after which the run stops. An update is skipped if its
    gradient is NaN or inf."""

    def check(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            require(getattr(self, name) > 0, f"{name} = {getattr(self, name)} must be above 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"{name} = {getattr(self, name)} must be at least 0 and below 1")
        require(self.max_skipped_updates >= 1, f"max_skipped_updates = {self.max_skipped_updates} must be at least 1")
        for name in ("warmup_steps", "weight_decay"):
            require(getattr(self, name) >= 0, f"{name} = {getattr(self, name)} must not be negative")
