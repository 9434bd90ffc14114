"""What is trained, and what it is measured against: the adapter and the reference."""

import math
import re
from typing import Literal

from learner.config.section import Section, any_of, require
from protocol.config import MayChange

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
    device: MayChange[str] = "same"
    """Where the weights are kept between passes, in the run's dtype (ema: float32): same: where the policy is; cpu: host memory (pinned where there is
    CUDA); or a GPU such as cuda:1. This frees memory between passes only: each pass runs on the policy's device, to which one
    copy of the weights is moved for it."""

    def lacking(self) -> dict[str, str]:
        users = {
            key: [kind for kind in NEEDS if key in NEEDS[kind] + MAY_HAVE[kind]]
            for key in self.__struct_fields__
            if key != "kind"
        }
        of_other_kinds = {key: any_of("kind", kinds) for key, kinds in users.items() if self.kind not in kinds}
        return self._lacking_in_the_interval() | of_other_kinds

    def _lacking_in_the_interval(self) -> dict[str, str]:
        name, first = self._first_interval
        if self.min_every_steps is not None:
            longest = self.max_every_steps or (self.min_every_steps if self.growth is None else math.inf)
            if longest <= self.patience:  # which keeps refreshes that far apart already
                keys = ("min_every_steps", "growth", "max_every_steps")
                return dict.fromkeys(keys, f"to rise above patience = {self.patience}")
        if self.growth is None:
            return {"max_every_steps": "growth"}
        if first is not None and self.max_every_steps == first:
            return dict.fromkeys(("growth", "max_every_steps"), f"a max_every_steps above {name}")
        return {}

    def check(self) -> None:
        for key in NEEDS[self.kind]:
            require(getattr(self, key) is not None, f'kind = "{self.kind}" needs {key}')
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

    def _check_pattern(self) -> None:
        try:
            re.compile(self.only or "")
        except re.error as error:
            raise ValueError(f"only = {self.only!r} is no regular expression: {error}") from error

    def _check_interval(self) -> None:
        name, first = self._first_interval
        require(
            self.growth is None or 1 < self.growth < math.inf,
            f"growth = {self.growth} must be above 1 and finite; to keep the steps between refreshes, remove it",
        )
        require(self.growth is None or first is not None, f"growth = {self.growth} needs {name}, which it multiplies")
        require(
            self.max_every_steps is None or first is None or self.max_every_steps >= first,
            f"max_every_steps = {self.max_every_steps} must not be below {name} = {first}, with which growth begins",
        )

    @property
    def _first_interval(self) -> tuple[str, int | None]:
        """The key that growth multiplies."""
        name = "every_steps" if self.kind == "every" else "min_every_steps"
        return name, getattr(self, name)


class LoraConfig(Section):
    """A low-rank adapter as the policy. It has no dropout: the server samples without, so every ratio would be noise."""

    rank: int = 0
    """0: train the whole model; above: train rank · (inputs + outputs) numbers for each adapted layer, which wants about ten
    times the learning rate."""
    alpha: float = 32.0
    """The adapter counts alpha / rank, so that one learning rate suits every rank (arXiv 2106.09685)."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The linear layers that are adapted, by the end of their names, as `q_proj v_proj`; all-linear: all but the LM head."""

    def lacking(self) -> dict[str, str]:
        return dict.fromkeys(("alpha", "target_modules"), "rank above 0") if self.rank == 0 else {}

    def check(self) -> None:
        require(self.rank >= 0, f"rank = {self.rank} must not be negative; 0 trains the whole model")
        require(self.alpha > 0, f"alpha = {self.alpha} must be above 0")
        require(
            len(self.target_modules) > 0,
            'target_modules = [] adapts nothing; name layers or set it to "all-linear"',
        )
