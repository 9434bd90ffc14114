"""The learner's section of the config, with every default and every check between keys.

Each field's text is what `learner train --help` prints.
"""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from learner.data import DataConfig
from learner.normalization import Normalization
from learner.rewards import RewardConfig
from protocol.config import SharedConfig


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the learner's sections."""


def _require(condition: bool, problem: str) -> None:
    """Raise ValueError, which the loader turns into a ConfigError with the section's name."""
    if not condition:
        raise ValueError(problem)


class SamplingConfig(Section):
    """How completions are sampled."""

    num_completions: int = 8
    """Completions per prompt: the size of a group."""
    max_tokens: int = 512
    """A completion that reaches it is truncated and counted."""
    temperature: float = 1.0
    """Applied by the server to sample and by the learner to the same logits."""
    seeded: bool = False
    """Sample every completion with a seed of its own, so that runs repeat; slower on GPUs."""

    def __post_init__(self) -> None:
        _require(
            self.num_completions >= 2,
            f"num_completions = {self.num_completions}: a group needs at least 2, else it has no baseline",
        )
        _require(self.max_tokens >= 1, f"max_tokens = {self.max_tokens} must be at least 1")
        _require(
            0.01 <= self.temperature <= 2,
            f"temperature = {self.temperature} must lie between 0.01 (below it vLLM is greedy) and 2",
        )


class AdvantageConfig(Section):
    """From the rewards of a group to how much better each completion was."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """mean: the group's mean; leave_one_out: the mean of the group's other completions (RLOO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """group: divide by the group's standard deviation (Bessel) + 1e-4; batch: by that of the step; none (Dr. GRPO)."""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """With several reward functions: sum: add the rewards; normalize_then_sum: add the advantages of each (GDPO)."""


Objective = Literal["grpo", "gspo", "cispo", "sapo", "dppo", "reinforce"]

OBJECTIVE_DEFAULTS: dict[Objective, dict[str, float | None]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None},
    "cispo": {"clip_high": 4.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "dppo": {"tv_low": 0.2, "tv_high": 0.2, "log_ratio_penalty": 1e-3},
    "reinforce": {},
}
"""Which of the loss's bounds an objective uses, and their defaults."""

BOUNDS = sorted({bound for defaults in OBJECTIVE_DEFAULTS.values() for bound in defaults})


class LossConfig(Section):
    """The objective against the stored behaviour logprobs, its normalisation, and the KL to the reference."""

    objective: Objective = "grpo"
    """grpo: PPO's clip per token; gspo: per sequence; cispo: the ratio as a capped weight; sapo: a soft gate; dppo: a trust
    region in probability; reinforce: no ratio."""
    normalization: Normalization = "token"
    """token: mean over all tokens of the step; sequence: mean over completions of their means; dr_grpo: a constant."""
    clip_low: float | None = None
    """grpo (0.2), gspo (3e-4): a ratio below 1 - clip_low has no gradient when the advantage is negative."""
    clip_high: float | None = None
    """grpo (0.28, DAPO's clip-higher), gspo (4e-4): a ratio above 1 + clip_high has no gradient when the advantage is
    positive; cispo (4.0): the ratio counts at most 1 + clip_high."""
    dual_clip: float | None = None
    """grpo, gspo (off): a ratio above it has no gradient when the advantage is negative; above 1 + clip_high."""
    tau_positive: float | None = None
    """sapo (1.0): how fast the gate closes when the advantage is positive."""
    tau_negative: float | None = None
    """sapo (1.05): the same when it is negative."""
    tv_low: float | None = None
    """dppo (0.2): a token whose probability fell by more has no gradient when the advantage is negative."""
    tv_high: float | None = None
    """dppo (0.2): a token whose probability rose by more has no gradient when the advantage is positive."""
    log_ratio_penalty: float | None = None
    """dppo (1e-3): weight of (log ratio)²."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference; needs a reference."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_grad_k2"] = "k3"
    """With d = log reference - log policy: k1: -d; k2: d² / 2; k3: exp(d) - d - 1; k3_grad_k2: the value of k3, the gradient
    of k2, which is that of the KL itself."""

    def __post_init__(self) -> None:
        used = OBJECTIVE_DEFAULTS[self.objective]
        for bound in BOUNDS:
            value = getattr(self, bound)
            _require(
                value is None or bound in used,
                f'{bound} = {value} does nothing with objective = "{self.objective}", which uses: {", ".join(used) or "no bound"}',
            )
            _require(value is None or value >= 0, f"{bound} = {value} must not be negative")
        if "clip_low" in used:
            low, high = self.value("clip_low"), self.value("clip_high")
            _require(0 < low < 1, f"clip_low = {low} must lie between 0 and 1")
            _require(high >= low, f"clip_high = {high} must not be below clip_low = {low}")
            _require(
                self.dual_clip is None or self.dual_clip > 1 + high,
                f"dual_clip = {self.dual_clip} must be above 1 + clip_high = {1 + high}",
            )
        for tau in ("tau_positive", "tau_negative"):
            _require(tau not in used or self.value(tau) > 0, f"{tau} must be above 0")
        _require(self.kl_coef >= 0, f"kl_coef = {self.kl_coef} must not be negative")
        _require(
            self.kl_coef > 0 or self.kl_estimator == "k3",
            f'kl_estimator = "{self.kl_estimator}" does nothing with kl_coef = 0; remove it or set kl_coef',
        )

    def value(self, bound: str) -> float:
        """Return a bound as set, or the objective's default."""
        value = getattr(self, bound)
        default = OBJECTIVE_DEFAULTS[self.objective][bound]
        assert value is not None or default is not None, bound
        return value if value is not None else default  # type: ignore[return-value]


class ReferenceConfig(Section):
    """The model the KL is measured against."""

    kind: Literal["none", "fixed", "every", "ema"] = "none"
    """none; fixed: the initial weights; every: a copy of the policy, taken anew every `every_steps` steps; ema: moved
    towards the policy by `alpha` every `every_steps` steps."""
    every_steps: int | None = None
    """every, ema: optimizer steps between two refreshes."""
    alpha: float | None = None
    """ema: reference = (1 - alpha) · reference + alpha · policy, in float32 (TR-DPO, arXiv 2404.09656)."""

    def __post_init__(self) -> None:
        needed = {"none": (), "fixed": (), "every": ("every_steps",), "ema": ("every_steps", "alpha")}[self.kind]
        for key in ("every_steps", "alpha"):
            value = getattr(self, key)
            if key in needed:
                _require(value is not None, f'kind = "{self.kind}" needs {key}')
            else:
                _require(value is None, f'{key} = {value} does nothing with kind = "{self.kind}"; remove it')
        _require(
            self.every_steps is None or self.every_steps >= 1, f"every_steps = {self.every_steps} must be at least 1"
        )
        _require(
            self.alpha is None or 0 < self.alpha < 1,
            f'alpha = {self.alpha} must lie between 0 and 1; for a whole copy set kind = "every"',
        )


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm"):
            _require(getattr(self, name) > 0, f"{name} = {getattr(self, name)} must be above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"{name} = {getattr(self, name)} must be at least 0 and below 1")
        for name in ("warmup_steps", "weight_decay"):
            _require(getattr(self, name) >= 0, f"{name} = {getattr(self, name)} must not be negative")


class PushConfig(Section):
    """The transfer of weights into the server."""

    timeout_s: float = 60.0
    """Deadline of every arrow of a push: ready, each broadcast, done."""
    bucket_mib: int = 256
    """Size of the flat buckets the weights travel in."""
    max_attempts: int = 3
    """A failed push is tried again in a new epoch; after so many failures the run stops."""

    def __post_init__(self) -> None:
        _require(self.timeout_s > 0, f"timeout_s = {self.timeout_s} must be above 0")
        _require(self.bucket_mib >= 1, f"bucket_mib = {self.bucket_mib} must be at least 1")
        _require(self.max_attempts >= 1, f"max_attempts = {self.max_attempts} must be at least 1")


class ParityConfig(Section):
    """The check that server and learner give the same logprobs to the same tokens under the same weights."""

    max_abs_logprob: float | None = None
    """Bound on the mean |Δ logprob|; the run stops above it. Unset: 1e-3 in float32, 0.15 in bfloat16."""
    every_steps: int = 20
    """How often the fixed sequences are scored again on both sides; 0: only at the start."""

    def bound(self, dtype: str) -> float:
        if self.max_abs_logprob is not None:
            return self.max_abs_logprob
        return 1e-3 if dtype == "float32" else 0.15


class LearnerConfig(Section):
    """What the learner does."""

    data: DataConfig
    """Where the prompts come from."""
    reward: RewardConfig
    """What scores the completions."""
    steps: int
    """Optimizer steps of the run."""
    groups_per_step: int = 16
    """Groups that make the batch of one optimizer step."""
    max_staleness: int = 2
    """How many versions behind the learner the oldest token of a consumed group may be; 0 is the synchronous algorithm."""
    micro_batch_tokens: int = 16384
    """Padded tokens per forward pass; lower it when memory runs out. The result does not depend on it."""
    gradient_checkpointing: bool = False
    """Trade a second forward pass for memory."""
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    push: PushConfig = PushConfig()
    parity: ParityConfig = ParityConfig()
    checkpoint_every: int = 50
    """Steps between checkpoints; one is always written at the end."""
    trackers: tuple[Literal["tensorboard"], ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl."""
    dashboard_port: int = 8765
    """Port of the live dashboard on 127.0.0.1; 0 turns it off."""
    connect_timeout_s: float = 600.0
    """How long to wait for the server, at the start and whenever it is gone."""
    group_deadline_s: float = 600.0
    """How long the server may take over one group before it is asked for again."""
    max_group_attempts: int = 3
    """A prompt whose group fails so often is recorded as failed and left out."""
    cpu_cores: tuple[int, ...] | None = None
    """Cores to run on, as positions in the list of cores this process may use; torch gets as many threads."""

    def __post_init__(self) -> None:
        for name in ("steps", "groups_per_step", "micro_batch_tokens", "checkpoint_every", "max_group_attempts"):
            _require(getattr(self, name) >= 1, f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("connect_timeout_s", "group_deadline_s"):
            _require(getattr(self, name) > 0, f"{name} = {getattr(self, name)} must be above 0")
        _require(self.max_staleness >= 0, f"max_staleness = {self.max_staleness} must not be negative")
        num_weighted = sum(weight != 0 for weight in self.reward.weights or self.reward.functions)
        _require(
            self.advantage.combine == "sum" or num_weighted > 1,
            f'advantage.combine = "normalize_then_sum" does nothing with {num_weighted} reward function; set it to "sum"',
        )
        has_reference = self.reference.kind != "none"
        _require(
            has_reference or self.loss.kl_coef == 0,
            f"loss.kl_coef = {self.loss.kl_coef} needs a reference; "
            'set reference.kind to "fixed", "every" or "ema", or kl_coef to 0',
        )
        _require(
            not has_reference or self.loss.kl_coef > 0,
            f'reference.kind = "{self.reference.kind}" with loss.kl_coef = 0 costs a forward pass and changes nothing; '
            'set kl_coef above 0 or reference.kind to "none"',
        )


class LearnerRun(SharedConfig):
    """Train a model: `learner train run.toml`."""

    learner: LearnerConfig
    """What the learner does."""
    server: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """The server's section: not read here."""
