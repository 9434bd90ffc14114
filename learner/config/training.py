"""Config of the optimizer, and of the supervised warm start before it."""

from typing import Literal

from learner.config.section import AtLeastOne, Fraction, NotNegative, Positive, Section
from protocol.config_keys import MayChange


class WarmStartConfig(Section):
    """Supervised training on the data's answers before the first step.

    For a model that would otherwise never be rewarded.
    """

    steps: NotNegative[int] = 0
    """Optimizer steps on answers. 0: no warm start."""
    learning_rate: Positive[float] = 1e-5
    """Learning rate of AdamW. Its other settings are those of learner.optimizer. The optimizer of the run
    starts fresh."""
    rows_per_step: AtLeastOne[int] = 32
    """Rows of data per optimizer step, over all ranks."""
    answer_column: str = "answer"
    """Column with the text to learn. The end-of-sequence token is appended."""

    def unmet_needs(self) -> dict[str, str]:
        others = ("learning_rate", "rows_per_step", "answer_column")
        return dict.fromkeys(others, "steps above 0") if self.steps == 0 else {}


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer. adamw: AdamW; adamw_8bit: AdamW with 8-bit moments by bitsandbytes (`[adamw-8bit]`), at a
    quarter of their memory, not under FSDP."""
    learning_rate: MayChange[Positive[float]] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up."""
    warmup_steps: NotNegative[int] = 0
    """Steps over which the learning rate rises to its peak. It is above 0 from the first step on, so no step
    is wasted."""
    beta1: Fraction[float] = 0.9
    """First-moment decay of AdamW."""
    beta2: Fraction[float] = 0.95
    """Second-moment decay of AdamW."""
    weight_decay: NotNegative[float] = 0.0
    """Weight decay of AdamW, for matrices only. Norms, biases and embeddings have none."""
    max_grad_norm: Positive[float] = 1.0
    """Maximum norm of the gradient. Larger gradients are clipped to it."""
    max_skipped_updates: MayChange[AtLeastOne[int]] = 5
    """Maximum number of consecutive skipped updates, after which the run stops. An update is skipped if its
    gradient is NaN or inf."""
