"""What every rank trains: the policy, its optimizer, its reference, and what changes with them from step to step."""

from pathlib import Path

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from learner.algorithm.schedules import next_coef
from learner.config import LearnerConfig, LearnerRun
from learner.forward.fused import fuse
from learner.forward.settle import PACKED, settle_attention
from learner.material import Material
from learner.policy.compute_dtype import compute_in
from learner.policy.lora import add_adapter
from learner.policy.memory import ModelShape
from learner.policy.model import load_policy
from learner.policy.published import PublishedPolicy
from learner.policy.reference import Reference, make_reference
from learner.training.extremes import Extremes
from learner.training.finite import require_finite_weights
from learner.training.mismatch import Mismatch
from learner.training.optimizer import make_optimizer
from learner.training.warm_start import warm_start
from protocol.errors import ConfigError


class Trainee(msgspec.Struct, eq=False, kw_only=True):
    """The policy as prepared by accelerate and all that belongs to it."""

    run: LearnerRun
    model_path: Path
    """Of the model the run began with."""
    accelerator: Accelerator
    policy: nn.Module
    published: PublishedPolicy
    optimizer: torch.optim.Optimizer
    reference: Reference | None
    kl_coef: float
    shape: ModelShape | None
    log_ratios: Extremes = msgspec.field(default_factory=Extremes)
    mismatch: Mismatch = msgspec.field(default_factory=Mismatch)
    num_skipped_in_a_row: int = 0
    """Updates whose gradient was no number, up to the newest."""

    @property
    def config(self) -> LearnerConfig:
        return self.run.learner

    def after_step(self, version: int, metrics: dict[str, float]) -> dict[str, float]:
        """Move the weight of the KL and the reference. Metrics: the weight that was used, the reference there is now."""
        if self.reference is None:
            return {}
        used_coef = self.kl_coef
        self.set_kl_coef(version, metrics.get("reference/kl"))
        refreshed = self.reference.after_step(self.policy, version, metrics)
        if refreshed and self.config.reference.reset_optimizer:
            self.optimizer.state.clear()
        return {
            "reference/kl_coef": used_coef,
            "reference/version": float(self.reference.version),
            "reference/refreshed": float(refreshed),
        }

    def set_kl_coef(self, version: int, measured_kl: float | None) -> None:
        """Set the weight of the KL for the step that trains `version`; also after a resume, whose `steps` may be others."""
        self.kl_coef = next_coef(
            self.config.kl, self.kl_coef, version=version, num_steps=self.config.steps, measured_kl=measured_kl
        )


def make_trainee(material: Material, accelerator: Accelerator, *, is_new: bool) -> Trainee:
    """Load the policy and build what trains it. That of a new run is warm-started, if so configured, before the reference is
    taken from it; everything of another run comes from its checkpoint.
    """
    run = material.run
    config = run.learner
    _refuse_other_sharding(accelerator, run)
    # Frozen weights take no small steps, so they may lie in the dtype in which the server holds them: half the memory.
    dtype = getattr(torch, run.dtype) if config.lora.rank else torch.float32
    policy = load_policy(
        material.model_path,
        dtype=dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        attn_implementation=None if config.attn_implementation == PACKED else config.attn_implementation,
        max_model_len=run.server.get("max_model_len"),
    )
    settle_attention(policy, accelerator.device, getattr(torch, run.dtype), config.attn_implementation)
    if config.lora.rank:
        add_adapter(policy, config.lora, run.seed)
    compute_in(getattr(torch, run.dtype), policy, accelerator)
    optimizer = make_optimizer(policy.parameters(), config.optimizer, config.optimizer.learning_rate)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    if config.compiles_on(accelerator.device.type, is_sharded=accelerator.is_fsdp2):
        fuse(policy, getattr(torch, run.dtype))
    if is_new and config.warm_start.steps > 0:
        warm_start(material, accelerator, policy)
    require_finite_weights(accelerator, policy, f"the weights of {material.model_path}, or of its warm start,")
    reference = make_reference(config.reference, policy, accelerator, config.sampling.temperature)
    return Trainee(
        run=run,
        model_path=material.model_path,
        accelerator=accelerator,
        policy=policy,
        published=PublishedPolicy(accelerator, policy, getattr(torch, run.dtype)),
        optimizer=optimizer,
        reference=reference,
        kl_coef=config.kl.coef,
        shape=material.shape,
    )


def _refuse_other_sharding(accelerator: Accelerator, run: LearnerRun) -> None:
    """Refuse what keeps parameters elsewhere than under their own names."""
    kind = accelerator.distributed_type
    if not accelerator.is_fsdp2:
        if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ConfigError(
                f"accelerate shards the policy by {kind.value}, whose parameters cannot be gathered one at a time under their "
                "names; expected FSDP2 (fsdp_version: 2 in accelerate's config, or FSDP_VERSION=2) or no sharding"
            )
        return
    if run.learner.compile is True:
        raise ConfigError(
            "learner.compile = true and FSDP2: code compiled over weights that come and go has not been tried; set learner.compile to "
            "false, or start the learner without FSDP"
        )
    plugin = accelerator.state.fsdp_plugin
    if run.learner.optimizer.kind == "adamw_8bit":
        raise ConfigError(
            'learner.optimizer.kind = "adamw_8bit" and FSDP2: bitsandbytes does not know parameters that lie on several ranks. Set '
            'learner.optimizer.kind to "adamw", whose moments the ranks share, or start the learner without FSDP'
        )
    if plugin.activation_checkpointing:
        raise ConfigError(
            "fsdp_activation_checkpointing changes the names of the parameters; turn it off and set "
            "learner.gradient_checkpointing = true"
        )
