"""The learner's section of the config, with every default and every check between keys.

Each field's text is what `learner train --help` prints.
"""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from learner.contradictions import DEFAULT_MAX_REPLACEMENTS, refuse_contradictions
from learner.curriculum import CurriculumConfig
from learner.data import DataConfig
from learner.lora_config import LoraConfig
from learner.loss_config import CorrectionConfig, KlConfig, LossConfig
from learner.reference_config import ReferenceConfig
from learner.reward_config import RewardConfig
from learner.section import Section, require
from learner.warm_start_config import WarmStartConfig
from protocol.config import SharedConfig


class SamplingConfig(Section):
    """How completions are sampled."""

    num_completions: int = 8
    """Completions per prompt: the size of a group."""
    max_tokens: int = 512
    """A completion that reaches it is truncated and counted."""
    temperature: float = 1.0
    """Applied by the server to sample and by the learner to the same logits."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that make up this probability; below 1 only with allow_partial_support."""
    top_k: int = 0
    """Sample from so many likeliest tokens; 0: from all; above 0 only with allow_partial_support."""
    allow_partial_support: bool = False
    """Train on completions sampled with top_p or top_k, although their logprobs are not those of the whole distribution."""
    seeded: bool = False
    """Sample every completion with a seed of its own, so that runs repeat; slower on GPUs."""

    def __post_init__(self) -> None:
        require(
            self.num_completions >= 2,
            f"num_completions = {self.num_completions}: a group needs at least 2, else it has no baseline",
        )
        require(self.max_tokens >= 1, f"max_tokens = {self.max_tokens} must be at least 1")
        require(
            0.01 <= self.temperature <= 2,
            f"temperature = {self.temperature} must lie between 0.01 (below it vLLM is greedy) and 2",
        )
        require(0 < self.top_p <= 1, f"top_p = {self.top_p} must lie above 0 and be at most 1")
        require(self.top_k >= 0, f"top_k = {self.top_k} must not be negative; 0 samples from all tokens")
        is_partial = self.top_p < 1 or self.top_k > 0
        require(
            self.allow_partial_support or not is_partial,
            f"top_p = {self.top_p}, top_k = {self.top_k}: the server's logprobs would be of the truncated distribution and "
            "the learner's of the whole one, so that every importance ratio is too small (TRL measured a mean of 0.90 at "
            "top_p = 0.8). Set top_p = 1 and top_k = 0, or allow_partial_support = true to train all the same",
        )
        require(
            is_partial or not self.allow_partial_support,
            "allow_partial_support = true does nothing with top_p = 1 and top_k = 0; remove it",
        )


class AdvantageConfig(Section):
    """From the rewards of a group to how much better each completion was."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """mean: the group's mean; leave_one_out: the mean of the group's other completions (RLOO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """group: divide by the group's standard deviation (Bessel) + 1e-4; batch: by that of the step; none (Dr. GRPO)."""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """With several reward functions: sum: add the rewards; normalize_then_sum: add the advantages of each (GDPO)."""


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
            require(getattr(self, name) > 0, f"{name} = {getattr(self, name)} must be above 0")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"{name} = {getattr(self, name)} must be at least 0 and below 1")
        for name in ("warmup_steps", "weight_decay"):
            require(getattr(self, name) >= 0, f"{name} = {getattr(self, name)} must not be negative")


class PushConfig(Section):
    """The transfer of weights into the server."""

    timeout_s: float = 60.0
    """Deadline of every arrow of a push: ready, each broadcast, done."""
    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """auto: ipc where learner and server share one GPU, nccl between GPUs (needs cupy), else gloo (TCP between CPUs)."""
    bucket_mib: int = 256
    """Size of the flat buckets the weights travel in; a tensor that is larger is a bucket alone. The server holds two or three."""
    overlap: bool = False
    """Push a copy of the weights while the next step is computed; costs the memory of the copy."""
    wire: Literal["dense", "delta"] = "dense"
    """delta: only what has changed since the last push, bit for bit; costs both sides a copy of the weights, pays off on links
    between nodes."""
    max_attempts: int = 3
    """A failed push is tried again in a new epoch; after so many failures the run stops."""

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, f"timeout_s = {self.timeout_s} must be above 0")
        require(self.bucket_mib >= 1, f"bucket_mib = {self.bucket_mib} must be at least 1")
        require(self.max_attempts >= 1, f"max_attempts = {self.max_attempts} must be at least 1")


class ParityConfig(Section):
    """The check that server and learner give the same logprobs to the same tokens under the same weights."""

    max_abs_logprob: float | None = None
    """Bound on the mean |Δ logprob|; the run stops above it. Unset: 1e-3 in float32, 0.15 in bfloat16."""
    every_steps: int = 1
    """After every how many pushes a fixed sequence is scored on both sides, before its tokens are trained on; 0: only at the start."""

    def __post_init__(self) -> None:
        require(
            self.every_steps >= 0, f"every_steps = {self.every_steps} must not be negative; 0 checks only at the start"
        )
        require(
            self.max_abs_logprob is None or self.max_abs_logprob > 0,
            f"max_abs_logprob = {self.max_abs_logprob} must be above 0",
        )

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
    updates_per_batch: int = 1
    """Optimizer updates on each batch; above 1 the later ones go further from the policy that sampled it."""
    micro_batch_tokens: int = 16384
    """Padded tokens per forward pass; lower it when memory runs out. The result does not depend on it."""
    gradient_checkpointing: bool = False
    """Trade a second forward pass for memory."""
    lora: LoraConfig = LoraConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    active_sampling: bool = False
    """Replace groups without signal (all rewards equal, before any KL) by other prompts, so that every batch is full of groups
    that teach something (DAPO's dynamic sampling)."""
    max_replacements: int = DEFAULT_MAX_REPLACEMENTS
    """With active_sampling: a step replaces at most so many times groups_per_step groups; further ones are taken as they are,
    with a warning."""
    curriculum: CurriculumConfig = CurriculumConfig()
    sampling: SamplingConfig = SamplingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    push: PushConfig = PushConfig()
    parity: ParityConfig = ParityConfig()
    checkpoint_every: int = 50
    """Steps between checkpoints; one is always written at the end."""
    keep_last: int = 2
    """How many of the newest checkpoints stay, 0: all; a resume goes on from the newest, or, when newer ones are removed by
    hand, from any of these. While one is written there is one more."""
    keep_best: int = 1
    """So many with the highest mean reward over the steps that led to them stay too, however old."""
    export_model: bool = True
    """Also write the policy into each checkpoint as `model/`, in the run's dtype and with the adapter merged, for `vllm serve`
    and `from_pretrained`."""
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
        for name in (
            "steps",
            "groups_per_step",
            "updates_per_batch",
            "micro_batch_tokens",
            "checkpoint_every",
            "max_group_attempts",
            "max_replacements",
        ):
            require(getattr(self, name) >= 1, f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("connect_timeout_s", "group_deadline_s"):
            require(getattr(self, name) > 0, f"{name} = {getattr(self, name)} must be above 0")
        for name in ("keep_last", "keep_best"):
            require(getattr(self, name) >= 0, f"{name} = {getattr(self, name)} must not be negative")
        require(self.max_staleness >= 0, f"max_staleness = {self.max_staleness} must not be negative")
        refuse_contradictions(self)

    @property
    def rejects_tokens(self) -> bool:
        """Whether some tokens that are trained on may be left out of the objective, or count less."""
        correction = self.correction
        return (
            correction.weight != "none"
            or correction.sequence_mask is not None
            or correction.max_token_staleness is not None
            or self.loss.top_entropy_frac < 1
        )


class LearnerRun(SharedConfig):
    """Train a model: `learner train run.toml`."""

    learner: LearnerConfig
    """What the learner does."""
    server: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """The server's section: not read here."""
