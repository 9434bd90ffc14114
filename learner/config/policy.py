"""What is trained, and what it is measured against: the adapter and the reference.

Every key that would do nothing beside the others is refused with the reason.
"""

import math
import re
from typing import Literal

from learner.config.section import Section, require

ReferenceKind = Literal["none", "fixed", "every", "ema", "adaptive", "mixture"]

NEEDS: dict[ReferenceKind, tuple[str, ...]] = {
    "none": (),
    "fixed": (),
    "every": ("every_steps",),
    "ema": ("every_steps", "alpha"),
    "adaptive": ("kl_threshold",),
    "mixture": ("every_steps", "num_snapshots"),
}
"""The keys without which a kind is not defined."""

MAY_HAVE: dict[ReferenceKind, tuple[str, ...]] = {
    "none": (),
    "fixed": ("device",),
    "every": ("growth", "max_every_steps", "only", "reset_optimizer", "device"),
    "ema": ("only", "reset_optimizer", "device"),
    "adaptive": ("patience", "reward_guard", "min_every_steps", "growth", "max_every_steps", "only", "reset_optimizer",
                 "device"),
    "mixture": ("only", "reset_optimizer", "device"),
}  # fmt: skip
"""The keys that change something for a kind, beside those it needs."""


class ReferenceConfig(Section):
    """The policy the KL is measured against."""

    kind: ReferenceKind = "none"
    """none; fixed: the initial weights; every: a copy of the policy, taken anew every `every_steps` steps; ema: moved towards
    the policy by `alpha` every `every_steps` steps; adaptive: a copy, taken anew when the KL stays above `kl_threshold`;
    mixture: the mean of the distributions of the last `num_snapshots` copies, taken every `every_steps` steps."""
    every_steps: int | None = None
    """every, ema, mixture: optimizer steps between two refreshes."""
    growth: float | None = None
    """every, adaptive: after each refresh the steps to the next one (every_steps, min_every_steps) are multiplied by it."""
    max_every_steps: int | None = None
    """every, adaptive: where that growth ends."""
    alpha: float | None = None
    """ema: reference = (1 - alpha) · reference + alpha · policy, in float32 (TR-DPO, arXiv 2404.09656)."""
    kl_threshold: float | None = None
    """adaptive: refresh when the step's mean KL per token, `reference/kl`, lies above it `patience` steps in a row."""
    patience: int = 3
    """adaptive: so many steps in a row."""
    reward_guard: bool = True
    """adaptive: and only while the moving average of `reward/mean` (a tenth of the way each step) is not below what it was at
    the last refresh or, before the first one, at the first step: a policy that got worse does not become the reference."""
    min_every_steps: int | None = None
    """adaptive: optimizer steps that at least lie between two refreshes."""
    num_snapshots: int | None = None
    """mixture: a token's reference probability is the mean under so many copies; a pass and a copy of the weights for each."""
    only: str | None = None
    """Refresh only parameters whose name contains a match of this regular expression; the others stay as at the start."""
    reset_optimizer: bool = False
    """Start from fresh optimizer moments after each refresh (ProRL, arXiv 2505.24864); the learning rate goes on."""
    device: str = "same"
    """Where the weights are kept in float32 between passes: same: where the policy is; cpu: host memory (pinned where there is
    CUDA); or a GPU such as cuda:1. This frees memory between passes only: each pass runs on the policy's device, to which one
    copy of the weights is moved for it."""

    def __post_init__(self) -> None:
        self._refuse_keys_of_other_kinds()
        for key, least in (("every_steps", 1), ("min_every_steps", 1), ("patience", 1), ("num_snapshots", 2)):
            value = getattr(self, key)
            require(value is None or value >= least, f"{key} = {value} must be at least {least}")
        require(
            self.alpha is None or 0 < self.alpha < 1,
            f'alpha = {self.alpha} must lie between 0 and 1; for a whole copy set kind = "every"',
        )
        require(
            self.kl_threshold is None or 0 < self.kl_threshold < math.inf,
            f'kl_threshold = {self.kl_threshold} must be above 0 and finite; for no refresh set kind = "fixed"',
        )
        self._check_interval()
        require(
            not (self.reset_optimizer and self.every_steps == 1 and self.growth is None),
            "reset_optimizer = true with every_steps = 1: the moments would never outlive a step; raise every_steps",
        )
        self._check_pattern()
        require(
            re.fullmatch(r"same|cpu|cuda:\d+", self.device) is not None,
            f'device = {self.device!r} must be "same", "cpu" or a GPU such as "cuda:1"',
        )

    def _refuse_keys_of_other_kinds(self) -> None:
        used = NEEDS[self.kind] + MAY_HAVE[self.kind]
        for key in NEEDS[self.kind]:
            require(getattr(self, key) is not None, f'kind = "{self.kind}" needs {key}')
        for key, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            value = getattr(self, key)
            require(
                key == "kind" or key in used or value == default,
                f'{key} = {value!r} does nothing with kind = "{self.kind}", which uses: {", ".join(used) or "nothing"}; '
                "remove it",
            )

    def _check_pattern(self) -> None:
        try:
            re.compile(self.only or "")
        except re.error as error:
            raise ValueError(f"only = {self.only!r} is no regular expression: {error}") from error

    def _check_interval(self) -> None:
        first = self.every_steps if self.kind == "every" else self.min_every_steps
        name = "every_steps" if self.kind == "every" else "min_every_steps"
        require(
            self.growth is None or 1 < self.growth < math.inf,
            f"growth = {self.growth} must be above 1 and finite; to keep the steps between refreshes, remove it",
        )
        require(self.growth is None or first is not None, f"growth = {self.growth} needs {name}, which it multiplies")
        require(
            self.max_every_steps is None or self.growth is not None,
            f"max_every_steps = {self.max_every_steps} does nothing without growth; remove it",
        )
        require(
            self.max_every_steps is None or first is None or self.max_every_steps > first,
            f"max_every_steps = {self.max_every_steps} must be above {name} = {first}, or growth does nothing",
        )
        if self.min_every_steps is not None:
            longest = self.max_every_steps or (self.min_every_steps if self.growth is None else math.inf)
            require(
                longest > self.patience,
                f"min_every_steps never rises above {longest} and does nothing: patience = {self.patience} keeps refreshes "
                "that far apart already; raise it or remove it",
            )


class LoraConfig(Section):
    """A low-rank adapter as the policy. It has no dropout: the server samples without, so every ratio would be noise."""

    rank: int = 0
    """0: train the whole model; above: train rank · (inputs + outputs) numbers for each adapted layer, which wants about ten
    times the learning rate."""
    alpha: float = 32.0
    """The adapter counts alpha / rank, so that one learning rate suits every rank (arXiv 2106.09685)."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The linear layers that are adapted, by the end of their names, as `q_proj v_proj`; all-linear: all but the LM head."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, f"rank = {self.rank} must not be negative; 0 trains the whole model")
        for key, default in (("alpha", 32.0), ("target_modules", "all-linear")):
            value = getattr(self, key)
            require(
                self.rank > 0 or value == default,
                f"{key} = {value!r} does nothing with rank = 0, which trains the whole model; set rank or remove it",
            )
        require(self.alpha > 0, f"alpha = {self.alpha} must be above 0")
        require(
            len(self.target_modules) > 0,
            'target_modules = [] adapts nothing; name layers or set it to "all-linear"',
        )
