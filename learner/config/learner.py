"""The learner's section as a whole, and what its parts refuse together: a key that does nothing beside another section's, or
that contradicts it. What a section can tell by itself, it refuses itself.
"""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from learner.config.algorithm import BOUNDS, AdvantageConfig, CorrectionConfig, KlConfig, LossConfig
from learner.config.policy import LoraConfig, ReferenceConfig
from learner.config.prompts import CurriculumConfig, DataConfig
from learner.config.rewards import RewardConfig
from learner.config.rollouts import SamplingConfig
from learner.config.section import Section, require
from learner.config.servers import ParityConfig, PushConfig
from learner.config.training import OptimizerConfig, WarmStartConfig
from protocol.config import SharedConfig

DEFAULT_MAX_REPLACEMENTS = 10


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


def refuse_contradictions(config: LearnerConfig) -> None:
    """Raise ValueError for the first contradiction found."""
    _refuse_rewards(config)
    _refuse_rollouts(config)
    _refuse_corrections(config)
    _refuse_references(config)


def _refuse_rewards(config: LearnerConfig) -> None:
    num_weighted = sum(weight != 0 for weight in config.reward.weight_by_name.values())
    require(
        config.advantage.combine == "sum" or num_weighted > 1,
        f'advantage.combine = "normalize_then_sum" does nothing with {num_weighted} reward function; set it to "sum"',
    )
    require(
        config.kl.place == "loss" or config.advantage.combine == "sum",
        'kl.place = "reward" with advantage.combine = "normalize_then_sum": there is no one reward to take the KL off; '
        'set combine to "sum" or place to "loss"',
    )
    require(
        config.kl.place == "loss" or config.advantage.scale != "group",
        'kl.place = "reward" with advantage.scale = "group": in a group whose rewards are all equal only the KL is left, and '
        'dividing by its own deviation cancels kl.coef; set scale to "batch" or "none", or place to "loss"',
    )


def _refuse_rollouts(config: LearnerConfig) -> None:
    require(
        not config.push.overlap or config.max_staleness > 0,
        "push.overlap = true with max_staleness = 0: the next step waits for groups of the version that is pushed, so nothing "
        "overlaps; raise max_staleness or set push.overlap = false",
    )
    require(
        config.active_sampling or config.max_replacements == DEFAULT_MAX_REPLACEMENTS,
        f"max_replacements = {config.max_replacements} does nothing without active_sampling = true",
    )
    buffer_tokens, max_tokens = config.reward.overlong_buffer_tokens, config.sampling.max_tokens
    require(
        buffer_tokens is None or buffer_tokens < max_tokens,
        f"reward.overlong_buffer_tokens = {buffer_tokens} must be below sampling.max_tokens = {max_tokens}, else every "
        "completion is penalised",
    )
    name = config.curriculum.reward
    require(
        name is None or name in config.reward.names,
        f"curriculum.reward = {name!r} is none of the reward functions: {', '.join(config.reward.names)}",
    )


def _refuse_corrections(config: LearnerConfig) -> None:
    correction, objective = config.correction, config.loss.objective
    if correction.anchor == "proximal":
        require(
            objective != "reinforce",
            'correction.anchor = "proximal" does nothing with loss.objective = "reinforce", which has no ratio',
        )
        is_one = correction.proximal == "exact" and config.updates_per_batch == 1
        require(
            not is_one or correction.weight != "none",
            'correction.anchor = "proximal" with updates_per_batch = 1 and correction.weight = "none": the ratio is always 1, so '
            "nothing is clipped or corrected; set correction.weight, raise updates_per_batch or use the behaviour anchor",
        )
        bounds = {bound: value for bound in BOUNDS if (value := getattr(config.loss, bound)) is not None}
        require(
            not is_one or not bounds,
            f"{', '.join(f'loss.{bound} = {value}' for bound, value in bounds.items())} does nothing with correction.anchor = "
            '"proximal" and updates_per_batch = 1: the ratio is always 1',
        )
        require(
            correction.proximal == "exact" or config.max_staleness > 0,
            'correction.proximal = "log_linear" with max_staleness = 0: without stale tokens it is the behaviour policy',
        )
    else:
        require(
            correction.weight != "truncate" or objective == "reinforce",
            f'correction.weight = "truncate" with anchor = "behaviour": the ratio of {objective} is the importance weight '
            'already, and would count twice; set anchor = "proximal", or weight = "mask" to leave tokens out',
        )
    leaves_tokens_out = {
        'correction.weight = "mask" with level = "token"': correction.weight == "mask" and correction.level == "token",
        f"correction.max_token_staleness = {correction.max_token_staleness}": correction.max_token_staleness
        is not None,
        f"loss.top_entropy_frac = {config.loss.top_entropy_frac}": config.loss.top_entropy_frac < 1,
    }
    for key, is_set in leaves_tokens_out.items():
        require(
            objective != "gspo" or not is_set,
            f'{key} with loss.objective = "gspo": its ratio is one of the whole completion, which the tokens left out would '
            'still move; leave out completions (level = "sequence" or "geometric", sequence_mask) or choose another objective',
        )
    require(
        correction.max_token_staleness is None or correction.max_token_staleness < config.max_staleness,
        f"correction.max_token_staleness = {correction.max_token_staleness} does nothing: no token is more than "
        f"max_staleness = {config.max_staleness} versions old",
    )


def _refuse_references(config: LearnerConfig) -> None:
    has_reference = config.reference.kind != "none"
    require(
        has_reference or not config.kl.is_on,
        f"kl.coef = {config.kl.coef} needs a reference; set reference.kind, or kl.coef to 0",
    )
    require(
        not has_reference or config.kl.is_on,
        f'reference.kind = "{config.reference.kind}" with kl.coef = 0 costs a forward pass and changes nothing; '
        'set kl.coef above 0 or reference.kind to "none"',
    )
    reference = config.reference
    is_policy_itself = reference.kind == "every" and reference.every_steps == 1 and reference.growth is None
    require(
        not is_policy_itself or (config.updates_per_batch > 1 and config.kl.place == "loss"),
        'reference.kind = "every" with every_steps = 1: where its KL is measured, at the start of a step, the reference is the '
        "policy itself and the KL 0; raise every_steps",
    )
    selects = {
        "active_sampling = true": config.active_sampling,
        f'curriculum.kind = "{config.curriculum.kind}"': config.curriculum.kind != "none",
    }
    for key, is_set in selects.items():
        require(
            reference.kind != "adaptive" or not reference.reward_guard or not is_set,
            f"{key} with reference.reward_guard = true: the mean reward of chosen groups falls while the policy improves, so the "
            "reference would never be refreshed; set reward_guard = false",
        )
