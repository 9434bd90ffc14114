"""Config of the policy's training: adapter, reference, optimizer, and supervised warm start."""

import math
import re
from typing import Literal

from learner.config.section import AtLeastOne, Fraction, NotNegative, Positive, Section, Timeout, any_of, require
from protocol.config_keys import MayChange

ReferenceKind = Literal["none", "fixed", "every", "ema", "adaptive", "mixture"]
ON_SERVER: tuple[ReferenceKind, ...] = ("fixed", "every", "adaptive")
"""Kinds that a server can hold: its own model, or a copy of the policy."""
NEEDS: dict[ReferenceKind, tuple[str, ...]] = {
    "none": (),
    "fixed": (),
    "every": ("every_steps",),
    "ema": ("every_steps", "alpha"),
    "adaptive": ("kl_threshold",),
    "mixture": ("every_steps", "num_snapshots"),
}
"""Keys that each kind requires."""
MAY_HAVE: dict[ReferenceKind, tuple[str, ...]] = {
    "none": (),
    "fixed": ("device",),
    "every": ("growth", "max_every_steps", "only", "reset_optimizer", "device"),
    "ema": ("only", "reset_optimizer", "device"),
    "adaptive": ("patience", "reward_guard", "min_every_steps", "growth", "max_every_steps", "only", "reset_optimizer",
                 "device"),
    "mixture": ("only", "reset_optimizer", "device"),
}  # fmt: skip
"""Optional keys that affect each kind."""


class LoraConfig(Section):
    """Low-rank adapter as the policy.

    It has no dropout: the server samples without dropout, so every ratio would be noisy.
    """

    rank: int = 0
    """Rank of the adapter. 0: train the whole model; above 0: train rank · (inputs + outputs) numbers per
    adapted layer, which needs about ten times the learning rate."""
    alpha: Positive[float] = 32.0
    """Scale of the adapter, which counts alpha / rank, so that one learning rate suits every rank (arXiv
    2106.09685)."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers to adapt, by the end of their names, as in `q_proj v_proj`. all-linear: all except the LM
    head."""

    def unmet_needs(self) -> dict[str, str]:
        return dict.fromkeys(("alpha", "target_modules"), "rank above 0") if self.rank == 0 else {}

    def check(self) -> None:
        require(self.rank >= 0, f"rank = {self.rank} must not be negative; 0 trains the whole model")
        require(
            len(self.target_modules) > 0,
            'target_modules = [] adapts nothing; name layers or set it to "all-linear"',
        )


class ReferenceConfig(Section):
    """Reference policy that the KL is measured against."""

    kind: ReferenceKind = "none"
    """Kind of reference. none: no reference; fixed: the initial weights; every: a copy of the policy,
    refreshed every `every_steps` steps; ema: moved toward the policy by `alpha` every `every_steps` steps;
    adaptive: a copy, refreshed when the KL stays above `kl_threshold`; mixture: the mean distribution of the
    last `num_snapshots` copies, taken every `every_steps` steps."""
    every_steps: AtLeastOne[int] | None = None
    """Optimizer steps between two refreshes, for every, ema and mixture."""
    growth: float | None = None
    """Factor by which each refresh multiplies the steps to the next one (every_steps, min_every_steps), for
    every and adaptive."""
    max_every_steps: int | None = None
    """Maximum number of steps that growth reaches, for every and adaptive."""
    alpha: float | None = None
    """Weight of the policy in an update, for ema: reference = (1 - alpha) · reference + alpha · policy, in
    float32 (TR-DPO, arXiv 2404.09656)."""
    kl_threshold: float | None = None
    """Mean KL per token of a step, `reference/kl`, for adaptive. The reference is refreshed after `patience`
    steps in a row above it."""
    patience: AtLeastOne[int] = 3
    """Number of steps in a row above kl_threshold, for adaptive."""
    reward_guard: bool = True
    """Whether a refresh also requires that the policy has not become worse, for adaptive. The moving average
    of `reward/mean` (a tenth of the way each step) must not be below its value at the last refresh. Before
    the first refresh, its value at the first step counts."""
    min_every_steps: AtLeastOne[int] | None = None
    """Minimum number of optimizer steps between two refreshes, for adaptive."""
    num_snapshots: int | None = None
    """Number of copies, for mixture. A token's reference probability is the mean under the copies. Each costs
    a forward pass and a copy of the weights."""
    only: str | None = None
    """Regular expression for the parameters to refresh: those whose name contains a match. The others keep
    their initial values."""
    reset_optimizer: bool = False
    """Whether to reset the optimizer's moments after each refresh (ProRL, arXiv 2505.24864). The learning
    rate is not reset."""
    device: MayChange[str] = "same"
    """Location of the weights between passes, in the run's dtype (ema: float32). same: that of the policy;
    cpu: host memory, pinned if there is CUDA; or a GPU such as cuda:1. This frees memory only between passes:
    each pass runs on the policy's device, with one copy of the weights moved to it."""
    endpoint: MayChange[str | None] = None
    """Endpoint of an inference server that computes the reference's logprobs, which the learner then does not
    hold (docs/distillation.md). fixed: the model that this server was started with, which may be another one
    with the same tokenizer, a teacher; every or adaptive: a copy of the policy, sent to it by a weight sync.
    Unset: the learner holds the reference."""
    timeout_s: MayChange[Timeout] = 600.0
    """Maximum time for the server at `endpoint` to score one sequence. The run then stops, and a resume
    continues it. A server that is lost is waited for (learner.connect_timeout_s)."""

    def unmet_needs(self) -> dict[str, str]:
        users = {
            key: [kind for kind in NEEDS if key in NEEDS[kind] + MAY_HAVE[kind]]
            for key in self.__struct_fields__
            if key not in ("kind", "endpoint", "timeout_s")
        }
        users["endpoint"] = users["timeout_s"] = [kind for kind in NEEDS if kind != "none"]
        of_other_kinds = {key: any_of("kind", kinds) for key, kinds in users.items() if self.kind not in kinds}
        of_place = {"timeout_s": "endpoint"} if self.endpoint is None else {"device": "endpoint unset"}
        return self._unmet_in_the_interval() | of_place | of_other_kinds

    def _unmet_in_the_interval(self) -> dict[str, str]:
        name, first = self._first_interval
        if self.kind == "adaptive" and self.min_every_steps is not None:
            longest = self.max_every_steps or (self.min_every_steps if self.growth is None else math.inf)
            if longest <= self.patience:  # patience already keeps refreshes that far apart
                keys = ("min_every_steps", "growth", "max_every_steps")
                return dict.fromkeys(keys, f"a value above patience = {self.patience}")
        if self.growth is None:
            return {"max_every_steps": "growth"}
        if first is not None and self.max_every_steps == first:
            return dict.fromkeys(("growth", "max_every_steps"), f"a max_every_steps above {name}")
        return {}

    def check(self) -> None:
        for key in NEEDS[self.kind]:
            require(getattr(self, key) is not None, f'kind = "{self.kind}" needs {key}')
        require(
            self.num_snapshots is None or self.num_snapshots >= 2,
            f"num_snapshots = {self.num_snapshots} must be at least 2",
        )
        require(
            self.alpha is None or 0 < self.alpha < 1,
            f'alpha = {self.alpha} must be between 0 and 1; for a whole copy set kind = "every"',
        )
        require(
            self.kl_threshold is None or 0 < self.kl_threshold < math.inf,
            f'kl_threshold = {self.kl_threshold} must be above 0 and finite; for no refresh set kind = "fixed"',
        )
        self._check_interval()
        require(
            not (self.reset_optimizer and self.every_steps == 1 and self.growth is None),
            "reset_optimizer = true with every_steps = 1: the moments would be reset after every step; raise "
            "every_steps",
        )
        self._check_pattern()
        require(
            self.endpoint is None or self.kind in ON_SERVER,
            f'endpoint = "{self.endpoint}" with kind = "{self.kind}": a server holds one copy of a whole policy; set '
            f"{any_of('kind', ON_SERVER)}, or remove endpoint",
        )
        require(
            self.endpoint is None or self.only is None,
            f'endpoint = "{self.endpoint}" with only = {self.only!r}: a weight sync sends the whole policy; remove one '
            "of them",
        )
        require(
            re.fullmatch(r"same|cpu|cuda:\d+", self.device) is not None,
            f'device = {self.device!r} must be "same", "cpu" or a GPU such as "cuda:1"',
        )

    def _check_pattern(self) -> None:
        try:
            re.compile(self.only or "")
        except re.error as error:
            raise ValueError(f"only = {self.only!r} is not a regular expression: {error}; correct it") from error

    def _check_interval(self) -> None:
        name, first = self._first_interval
        require(
            self.growth is None or 1 < self.growth < math.inf,
            f"growth = {self.growth} must be above 1 and finite; to keep the steps between refreshes, remove it",
        )
        require(self.growth is None or first is not None, f"growth = {self.growth} needs {name}, which it multiplies")
        require(
            self.max_every_steps is None or first is None or self.max_every_steps >= first,
            f"max_every_steps = {self.max_every_steps} must not be below {name} = {first}, with which growth starts",
        )

    @property
    def is_synced(self) -> bool:
        """True if a server holds copies of the policy, which weight syncs send."""
        return self.endpoint is not None and self.kind != "fixed"

    @property
    def _first_interval(self) -> tuple[str, int | None]:
        """Key that growth multiplies, and its value."""
        name = "every_steps" if self.kind == "every" else "min_every_steps"
        return name, getattr(self, name)


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer. adamw: AdamW; adamw_8bit: AdamW with 8-bit moments by bitsandbytes (`[adamw-8bit]`), at a
    quarter of their memory, not under FSDP."""
    offload: MayChange[bool | Literal["auto"]] = "auto"
    """Whether to keep AdamW's moments in host memory. Each step moves them to the GPU and back, one tensor at a
    time. "auto": if the fastest settings that fit the memory need it."""
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

    def unmet_needs(self) -> dict[str, str]:
        return {} if self.kind == "adamw" else {"offload": 'kind = "adamw"'}


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
    """Column with the text to learn, or the first of a list. The end-of-sequence token is appended."""

    def unmet_needs(self) -> dict[str, str]:
        others = ("learning_rate", "rows_per_step", "answer_column")
        return dict.fromkeys(others, "steps above 0") if self.steps == 0 else {}
