"""The optimizer, and the supervised warm start before it."""

from typing import Literal

from learner.config.section import Section, require
from protocol.config import MayChange


class WarmStartConfig(Section):
    """Supervised training on the data's answers before the first step, for a model that would never be rewarded."""

    steps: int = 0
    """Optimizer steps on answers; 0: no warm start."""
    learning_rate: float = 1e-5
    """AdamW's learning rate; its other settings are those of learner.optimizer. The optimizer of the run starts fresh."""
    rows_per_step: int = 32
    """Rows of data per optimizer step, over all ranks."""
    answer_column: str = "answer"
    """The column with the text to learn; the end-of-sequence token is put after it."""

    def lacking(self) -> dict[str, str]:
        others = ("learning_rate", "rows_per_step", "answer_column")
        return dict.fromkeys(others, "steps above 0") if self.steps == 0 else {}

    def check(self) -> None:
        require(self.steps >= 0, f"steps = {self.steps} must not be negative")
        require(self.learning_rate > 0, f"learning_rate = {self.learning_rate} must be above 0")
        require(self.rows_per_step >= 1, f"rows_per_step = {self.rows_per_step} must be at least 1")


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: moments of 8 bits, a quarter of their memory, by bitsandbytes (`[adamw-8bit]`); not under FSDP."""
    learning_rate: MayChange[float] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its peak; the first has a share of it, so that none is wasted."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    weight_decay: float = 0.0
    """AdamW's weight decay, of matrices alone: norms, biases and embeddings have none."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    max_skipped_updates: MayChange[int] = 5
    """An update whose gradient is infinite or no number is skipped and counted; after so many in a row the run stops."""

    def check(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            require(getattr(self, name) > 0, f"{name} = {getattr(self, name)} must be above 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"{name} = {getattr(self, name)} must be at least 0 and below 1")
        require(self.max_skipped_updates >= 1, f"max_skipped_updates = {self.max_skipped_updates} must be at least 1")
        for name in ("warmup_steps", "weight_decay"):
            require(getattr(self, name) >= 0, f"{name} = {getattr(self, name)} must not be negative")
