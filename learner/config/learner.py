"""The learner's section as a whole, and the run that it belongs to."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import tyro

from learner.config.algorithm import AdvantageConfig, KlConfig, OffPolicyCorrectionConfig
from learner.config.contradictions import check_contradictions, unmet_requirements
from learner.config.evaluation import EvaluationConfig
from learner.config.loss import LossConfig
from learner.config.outputs import CheckpointConfig, ReportConfig
from learner.config.policy import LoraConfig, OptimizerConfig, ReferenceConfig, WarmStartConfig
from learner.config.rewards import RewardConfig
from learner.config.section import AtLeastOne, NotNegative, Section, Timeout, require, value_at
from learner.config.servers import ParityConfig, SamplingConfig, WeightSyncConfig
from learner.config.tasks import CurriculumConfig, DataConfig, EnvironmentConfig
from protocol.config import DEFAULT_ENDPOINT, DEFAULT_HTTP_PORT, SharedConfig
from protocol.config_keys import MayChange, check_section
from protocol.endpoint import check_endpoint, join_address, split_endpoint
from protocol.errors import ConfigError
from protocol.hardware import Cores

Sharding = Literal["none", "full", "hybrid"]
AUTO_TOKENS, AUTO_TOKENS_ON_CPU = 16384, 4096


class LearnerConfig(Section):
    """Settings of the learner."""

    data: DataConfig
    """Source of the prompts."""
    steps: MayChange[AtLeastOne[int]]
    """Number of optimizer steps of the run."""
    groups_per_step: AtLeastOne[int] = 16
    """Number of groups in the batch of one optimizer step."""
    max_staleness: MayChange[NotNegative[int] | Literal["auto"]] = 2
    """Maximum staleness of a consumed group: how many versions its oldest token may be behind the learner. 0:
    synchronous training; "auto": the smallest value, at least 1, that keeps the learner fed, adjusted to the
    run's bottleneck."""
    max_auto_staleness: MayChange[AtLeastOne[int]] = 8
    """Upper limit with max_staleness = "auto"."""
    updates_per_batch: AtLeastOne[int] = 1
    """Number of optimizer updates per batch. Above 1, later updates move further from the policy that sampled
    the batch."""
    micro_batch_tokens: MayChange[AtLeastOne[int] | Literal["auto"]] = "auto"
    """Number of tokens per forward pass. The result does not depend on it. "auto": what fits the memory, up to
    16,384 on a GPU, and up to 4,096 on a CPU, where larger passes no longer fit the caches."""
    attn_implementation: MayChange[str] = "packed"
    """Attention implementation. packed: sequences without padding, with the prompt of a group computed once;
    or an attention of transformers ("sdpa", "eager", "flash_attention_2"): padded sequences, each with its
    prompt. A model that cannot be packed is padded, and the log gives the reason. An implementation is
    refused if its logprobs differ from those of eager attention."""
    sharding: MayChange[Sharding | Literal["auto"]] = "auto"
    """Division of the policy, its gradients and its optimizer over the learner's ranks (FSDP2). none: each rank
    holds all of it; full: each holds a part; hybrid: the ranks of a node hold a part each, and every node holds
    all of it, so that weights travel within nodes only. "auto": the fastest that fits the memory. A single rank
    holds all of it, whatever the value."""
    gradient_checkpointing: MayChange[bool | Literal["auto"]] = "auto"
    """Whether to recompute activations in a second forward pass, which saves memory. "auto": if the fastest
    settings that fit the memory need it."""
    compile: MayChange[bool | Literal["auto"]] = "auto"
    """Whether to fuse the policy's norms, gated layers and rotary embedding with torch.compile, and on a GPU
    the head's operations on logits. It needs a C++ compiler. The first start takes up to two minutes longer;
    later starts reuse torch's cache. A model that cannot be fused runs without, and the log gives the reason.
    "auto": on GPUs, without routing_replay."""
    reward: RewardConfig = RewardConfig()
    """Scoring of the completions."""
    routing_replay: bool = False
    """Whether the learner's passes of a mixture-of-experts policy use the experts that the server's routers have
    chosen for each token (routing replay, R3). Otherwise, rounding lets the two sides choose different experts. The
    server must return its choices (server.return_routed_experts); "auto" does not compile such a policy."""
    lora: LoraConfig = LoraConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    dynamic_sampling: bool = False
    """Whether to replace groups without signal (all rewards equal, before any KL) by other prompts. Every
    batch is then full of groups with signal (DAPO's dynamic sampling)."""
    signal_reward: str | None = None
    """Name of the reward function whose rewards must differ within a group, with dynamic_sampling, such as the
    one for correct answers. Unset: the sum of all, without the overlong penalty."""
    max_resamples: MayChange[AtLeastOne[int]] = 10
    """Maximum number of groups that a step replaces with dynamic_sampling, in multiples of groups_per_step.
    Further groups are used unchanged, with a warning."""
    curriculum: CurriculumConfig = CurriculumConfig()
    sampling: SamplingConfig = SamplingConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    off_policy_correction: OffPolicyCorrectionConfig = OffPolicyCorrectionConfig()
    kl: KlConfig = KlConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    parity: ParityConfig = ParityConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    report: ReportConfig = ReportConfig()
    connect_timeout_s: MayChange[Timeout] = 600.0
    """Maximum time to wait for a server, at the start and whenever it is lost or serves another learner."""
    drain_timeout_s: MayChange[Timeout] = 60.0
    """Maximum time for a server to finish its pending groups, after its endpoint is removed from
    `endpoints_from` or it announces its shutdown. The remaining groups are then requested from other
    servers."""
    group_idle_timeout_s: MayChange[Timeout] = 600.0
    """Maximum time without a new token for a group in progress, not counting weight syncs, before it is
    requested again. If two or more of its completions are finished, it continues with those. A request that the
    server has lost is resent after the same time."""
    collective_timeout_s: MayChange[Timeout] = 600.0
    """With several ranks: maximum time that each waits for the others in a collective. It bounds how soon a
    hanging rank is noticed, or a dead one that the rank watch misses. It must exceed the time that rank 0
    needs to read the data, for a weight sync or for a checkpoint. Waits for the server do not count."""
    max_group_attempts: MayChange[AtLeastOne[int]] = 3
    """Number of failed attempts after which the group of a prompt is recorded as failed and left out."""
    cpu_cores: MayChange[Cores | None] = None
    """Cores to run on, as positions in the list of cores that this process may use. torch gets as many
    threads. Unset, without a GPU and with a server at a loopback endpoint: the cores that the server's
    section leaves, or the second half."""

    def unmet_needs(self) -> dict[str, str]:
        return unmet_requirements(self)

    def check(self) -> None:
        require(
            self.attn_implementation != "",
            'attn_implementation is empty; expected "packed", "sdpa" or another attention of transformers',
        )
        check_contradictions(self)

    @property
    def staleness_bound(self) -> int:
        """Maximum staleness that a consumed group may ever have, in versions."""
        return self.max_auto_staleness if self.max_staleness == "auto" else self.max_staleness

    def tokens_per_pass(self, device_type: str) -> int:
        """Return micro_batch_tokens for a device type, such as "cuda" or "cpu"; with "auto", its upper limit."""
        if self.micro_batch_tokens != "auto":
            return self.micro_batch_tokens
        return AUTO_TOKENS_ON_CPU if device_type == "cpu" else AUTO_TOKENS

    def compiles_on(self, device_type: str) -> bool:
        """Return whether the policy is fused on a device of this type."""
        return device_type != "cpu" and not self.routing_replay if self.compile == "auto" else self.compile

    @property
    def rejects_tokens(self) -> bool:
        """True if some trained tokens may be excluded from the objective, or count less."""
        correction = self.off_policy_correction
        return (
            correction.weight_used != "none"
            or correction.sequence_mask is not None
            or correction.max_binary_kl is not None
            or correction.max_token_staleness is not None
            or self.loss.top_entropy_frac < 1
        )


class ServerSection(msgspec.Struct, frozen=True):
    """Keys of [server] that the learner reads. The server checks the section as a whole."""

    max_model_len: int | None = None
    http_host: str = "127.0.0.1"
    http_port: int = DEFAULT_HTTP_PORT
    cpu_cores: Cores | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    overlap_weight_loading: bool = False
    max_lora_rank: int | None = None


class LearnerRun(SharedConfig):
    """Train a model: `slipstream train run.toml`."""

    COMMON = (
        "model", "run_dir", "endpoint", "dtype", "learner.steps", "learner.groups_per_step", "learner.max_staleness",
        "learner.data.path", "learner.data.dataset", "learner.sampling.group_size", "learner.sampling.max_tokens",
        "learner.reward.functions", "learner.optimizer.learning_rate", "learner.kl.coef",
        "learner.checkpoint.every_steps", "learner.evaluation.every_steps",
    )  # fmt: skip
    CONNECTS = True
    learner: LearnerConfig
    """Settings of the learner."""
    server: MayChange[Annotated[dict[str, Any], tyro.conf.Suppress]] = msgspec.field(default_factory=dict)
    """The server's section. The learner reads max_model_len, to which it pins RoPE, http_host and http_port, for
    evaluations, and what a server on the same GPU needs, for its memory plan."""
    deploy: MayChange[Annotated[dict[str, Any], tyro.conf.Suppress]] = msgspec.field(default_factory=dict)
    """Resources of the node per process. Read only by the learner's doctor."""

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of the checkpoints, which all ranks use."""
        return Path(self.learner.checkpoint.dir or Path(self.run_dir) / "checkpoints")

    @property
    def evaluation_url(self) -> str:
        """URL of the server that evaluations use. Raises ConfigError if none is known."""
        if self.learner.evaluation.url is not None:
            return self.learner.evaluation.url
        if self.server.get("http_port") == 0:
            raise ConfigError(
                "learner.evaluation.url is unset with server.http_port = 0: an evaluation sends its requests to the "
                "server over HTTP. Set server.http_port, or learner.evaluation.url"
            )
        if self.endpoints_from is not None:
            raise ConfigError(
                f"learner.evaluation.url is unset with endpoints_from = {self.endpoints_from!r}: the servers of the "
                "run may change, so no server for evaluations is known. Set learner.evaluation.url"
            )
        host = str(self.server.get("http_host", "127.0.0.1")).strip("[]")
        if host in ("0.0.0.0", "::"):
            host, _ = split_endpoint(self.servers[0])
        port = self.server.get("http_port", DEFAULT_HTTP_PORT)
        return f"http://{join_address(host, port)}/v1"

    def require_new_run_dir(self) -> None:
        """Raise ConfigError if `run_dir` contains a run, which only --resume may continue."""
        if (Path(self.run_dir) / "config.toml").exists():
            raise ConfigError(
                f"{self.run_dir} already contains a run; continue it with --resume, or choose another directory with "
                "--run-dir"
            )

    def check(self) -> None:
        check_section("server", self.server, ServerSection)
        sources = {
            "endpoint": self.endpoint if self.endpoint != DEFAULT_ENDPOINT else None,
            "endpoints": list(self.endpoints) or None,
            "endpoints_from": self.endpoints_from,
        }
        keys = [f"{key} = {value!r}" for key, value in sources.items() if value is not None]
        if len(keys) > 1:
            raise ConfigError(
                f"{' and '.join(keys)} are set, but each defines the servers of the run; keep one of them"
            )
        if self.learner.evaluation.every_steps:
            _ = self.evaluation_url
        if self.learner.reference.endpoint in self.servers:
            raise ConfigError(
                f'learner.reference.endpoint = "{self.learner.reference.endpoint}" is a server of the run, which has '
                "the weights of the policy; start another server for the reference"
            )
        if len(set(self.endpoints)) < len(self.endpoints):
            raise ConfigError(f"endpoints = {list(self.endpoints)} contains a server twice; list each endpoint once")
        if (endpoint := self.learner.in_effect().reference.endpoint) is not None:
            try:
                check_endpoint(endpoint, has_keys=self.keys is not None, insecure=self.insecure, connects=True)
            except ConfigError as error:
                raise ConfigError(f"learner.reference.endpoint: {error}") from error

    def in_effect(self) -> Self:
        """Return the run with its idle keys at their defaults."""
        return msgspec.structs.replace(self, learner=self.learner.in_effect())

    def idle_keys_note(self) -> str | None:
        """Return one line about the idle keys, or None if there are none."""
        idle = [
            f"learner.{key} = {value_at(self.learner, key)!r} (needs {need})"
            for key, need in sorted(self.learner.idle_keys().items())
        ]
        return f"these keys have no effect alongside the others: {'; '.join(idle)}" if idle else None
