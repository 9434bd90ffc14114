"""The learner's section as a whole, and the run that it is part of."""

from typing import Annotated, Any, Literal, Self

import msgspec
import tyro

from learner.config.algorithm import AdvantageConfig, CorrectionConfig, KlConfig, LossConfig
from learner.config.contradictions import refuse_contradictions, what_is_lacking
from learner.config.environment import EnvironmentConfig
from learner.config.evaluation import EvaluationConfig
from learner.config.policy import LoraConfig, ReferenceConfig
from learner.config.prompts import CurriculumConfig, DataConfig
from learner.config.report import ReportConfig
from learner.config.rewards import RewardConfig
from learner.config.rollouts import SamplingConfig
from learner.config.section import Section, require, value_at
from learner.config.servers import ParityConfig, PushConfig
from learner.config.storage import CheckpointConfig
from learner.config.training import OptimizerConfig, WarmStartConfig
from protocol.config import DEFAULT_ENDPOINT, DEFAULT_HTTP_PORT, MayChange, SharedConfig
from protocol.cores import Cores
from protocol.endpoint import join_address, split_endpoint
from protocol.errors import ConfigError

AUTO_TOKENS, AUTO_TOKENS_ON_CPU = 16384, 4096


class LearnerConfig(Section):
    """What the learner does."""

    data: DataConfig
    """Where the prompts come from."""
    reward: RewardConfig
    """What scores the completions."""
    steps: MayChange[int]
    """Optimizer steps of the run."""
    groups_per_step: int = 16
    """Groups that make the batch of one optimizer step."""
    max_staleness: MayChange[int | Literal["auto"]] = 2
    """How many versions behind the learner the oldest token of a consumed group may be; 0 is the synchronous algorithm. "auto": as
    few as keep the learner fed, at least 1, by what the run waits for."""
    max_auto_staleness: MayChange[int] = 8
    """With max_staleness = "auto": never more than this."""
    updates_per_batch: int = 1
    """Optimizer updates on each batch; above 1 the later ones go further from the policy that sampled it."""
    micro_batch_tokens: MayChange[int | Literal["auto"]] = "auto"
    """Tokens per forward pass; lower it when memory runs out. The result does not depend on it. "auto": 16,384 on a GPU, and 4,096
    on a CPU, where larger passes only leave the caches."""
    attn_implementation: MayChange[str] = "packed"
    """packed: sequences without padding, the prompt of a group computed once (a model that cannot is padded, and the log says
    why); or an attention of transformers ("sdpa", "eager", "flash_attention_2"): sequences are padded, each with its prompt. Refused
    where its logprobs are not those of eager attention."""
    gradient_checkpointing: MayChange[bool] = False
    """Trade a second forward pass for memory."""
    compile: MayChange[bool | Literal["auto"]] = "auto"
    """Fuse the policy's norms, gated layers, rotary embedding and, on a GPU, what its head does to logits with torch.compile. The first
    start takes up to two minutes longer, later ones find the code in torch's cache; it needs a C++ compiler. A model that cannot goes on
    without, and the log says why. "auto": on GPUs, except under FSDP."""
    lora: LoraConfig = LoraConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    active_sampling: bool = False
    """Replace groups without signal (all rewards equal, before any KL) by other prompts, so that every batch is full of groups
    that teach something (DAPO's dynamic sampling)."""
    signal_reward: str | None = None
    """With active_sampling: name of the reward function whose rewards must differ within a group, such as the one for right answers.
    Unset: the sum of all, without the overlong penalty."""
    max_replacements: MayChange[int] = 10
    """With active_sampling: a step replaces at most so many times groups_per_step groups; further ones are taken as they are,
    with a warning."""
    curriculum: CurriculumConfig = CurriculumConfig()
    sampling: SamplingConfig = SamplingConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    push: PushConfig = PushConfig()
    parity: ParityConfig = ParityConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    report: ReportConfig = ReportConfig()
    connect_timeout_s: MayChange[float] = 600.0
    """How long to wait for the server, at the start and whenever it is gone, or another learner has it."""
    drain_timeout_s: MayChange[float] = 60.0
    """How long a server whose endpoint was taken out of `endpoints_from`, or that was told to end and says so, may finish the groups that
    it owes; then they are asked for elsewhere."""
    group_deadline_s: MayChange[float] = 600.0
    """How long a group that the server has begun may go without a token, pushes aside, before it is asked for again; if two or
    more of its completions had ended by then, it goes on with those. A request that the server has lost is sent again
    after as long."""
    rank_timeout_s: MayChange[float] = 600.0
    """With several ranks: how long each waits for the others wherever they meet, so how soon one that died or hangs is noticed.
    It must be longer than rank 0 needs to read the data, for one push or for a checkpoint; waits for the server do not count."""
    max_group_attempts: MayChange[int] = 3
    """A prompt whose group fails so often is recorded as failed and left out."""
    cpu_cores: MayChange[Cores | None] = None
    """Cores to run on, as positions in the list of cores this process may use; torch gets as many threads. Unset, without a GPU and
    with a server at a loopback endpoint: those that the server's section leaves over, or the second half."""

    def lacking(self) -> dict[str, str]:
        return what_is_lacking(self)

    def check(self) -> None:
        for name in (
            "steps",
            "groups_per_step",
            "updates_per_batch",
            "max_group_attempts",
            "max_replacements",
        ):
            require(getattr(self, name) >= 1, f"{name} = {getattr(self, name)} must be at least 1")
        require(
            self.micro_batch_tokens == "auto" or self.micro_batch_tokens >= 1,
            f"micro_batch_tokens = {self.micro_batch_tokens} must be at least 1",
        )
        for name in ("connect_timeout_s", "drain_timeout_s", "group_deadline_s", "rank_timeout_s"):
            require(getattr(self, name) > 0, f"{name} = {getattr(self, name)} must be above 0")
        require(
            self.attn_implementation != "",
            'attn_implementation is empty; expected "packed", "sdpa" or another attention of transformers',
        )
        require(self.staleness_bound >= 0, f"max_staleness = {self.max_staleness} must not be negative")
        require(self.max_auto_staleness >= 1, f"max_auto_staleness = {self.max_auto_staleness} must be at least 1")
        refuse_contradictions(self)

    @property
    def staleness_bound(self) -> int:
        """The most versions that the oldest token of a consumed group may ever be behind."""
        return self.max_auto_staleness if self.max_staleness == "auto" else self.max_staleness

    def tokens_per_pass(self, device_type: str) -> int:
        """micro_batch_tokens on a device of this type: "cuda", "cpu"."""
        if self.micro_batch_tokens != "auto":
            return self.micro_batch_tokens
        return AUTO_TOKENS_ON_CPU if device_type == "cpu" else AUTO_TOKENS

    def compiles_on(self, device_type: str, *, is_sharded: bool) -> bool:
        """Whether the policy is fused on a device of this type."""
        return (device_type != "cpu" and not is_sharded) if self.compile == "auto" else self.compile

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
    server: MayChange[Annotated[dict[str, Any], tyro.conf.Suppress]] = msgspec.field(default_factory=dict)
    """The server's section; of it are read here: max_model_len, to which RoPE is pinned, and where evaluations ask, http_host and http_port."""
    deploy: MayChange[Annotated[dict[str, Any], tyro.conf.Suppress]] = msgspec.field(default_factory=dict)
    """Which part of a node each process gets: not read here."""

    @property
    def evaluation_url(self) -> str:
        """Whom evaluations ask."""
        host = str(self.server.get("http_host", "127.0.0.1")).strip("[]")
        if host in ("0.0.0.0", "::"):
            host, _ = split_endpoint(self.servers[0])
        port = self.server.get("http_port", DEFAULT_HTTP_PORT)
        return self.learner.evaluation.url or f"http://{join_address(host, port)}/v1"

    def check(self) -> None:
        evaluation = self.learner.evaluation
        if evaluation.every_steps and evaluation.url is None and self.server.get("http_port") == 0:
            raise ConfigError(
                f"learner.evaluation.every_steps = {evaluation.every_steps} with server.http_port = 0: an evaluation asks the server over HTTP. "
                "Set server.http_port, or every_steps = 0"
            )
        if evaluation.every_steps and evaluation.url is None and self.endpoints_from is not None:
            raise ConfigError(
                f"learner.evaluation.every_steps = {evaluation.every_steps} with endpoints_from = {self.endpoints_from!r}: servers come and go, and "
                "nobody knows which is asked. Set learner.evaluation.url"
            )
        said = {
            "endpoint": self.endpoint if self.endpoint != DEFAULT_ENDPOINT else None,
            "endpoints": list(self.endpoints) or None,
            "endpoints_from": self.endpoints_from,
        }
        keys = [f"{key} = {value!r}" for key, value in said.items() if value is not None]
        if len(keys) > 1:
            raise ConfigError(f"{' and '.join(keys)} both say where the servers are; keep one of them")
        if len(set(self.endpoints)) < len(self.endpoints):
            raise ConfigError(
                f"endpoints = {list(self.endpoints)} names a server twice; each has an endpoint of its own"
            )

    def in_effect(self) -> Self:
        """Return the same without the keys that do nothing."""
        return msgspec.structs.replace(self, learner=self.learner.in_effect())

    def note_on_idle_keys(self) -> str | None:
        """One line about them; None without any."""
        idle = [
            f"learner.{key} = {value_at(self.learner, key)!r} (needs {need})"
            for key, need in sorted(self.learner.idle_keys().items())
        ]
        return f"these keys do nothing beside the others: {'; '.join(idle)}" if idle else None
