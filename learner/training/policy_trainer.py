"""State that every rank trains: policy, optimizer and reference, and their changes from step to step."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from accelerate import Accelerator
from torch import nn

from learner.algorithm.plug_in import check_plug_ins, digest_of_plug_ins
from learner.config import LearnerConfig, LearnerRun
from learner.forward.compile import fuse
from learner.forward.logprobs import float32_heads, logit_map_of, logit_maps
from learner.forward.packing_check import PACKED, choose_attention
from learner.forward.probed_model import few_layers
from learner.forward.replay_check import find_routers
from learner.forward.tile import LogitMap
from learner.policy.hf_weights import held
from learner.policy.lora import add_adapter
from learner.policy.model import compute_in, load_policy
from learner.policy.model_shape import ModelShape
from learner.policy.published import PublishedPolicy
from learner.policy.reference import Reference
from learner.policy.server_reference import ServerReference
from learner.policy.sharded_loading import CheckpointReader, allocate, filled, in_name_only, make_reader, opened
from learner.policy.sharding import mesh_shape, shard
from learner.rank_agreement import decide_on_rank_0, first_problem, require_agreement
from learner.run_inputs import RunInputs
from learner.training.distributed import hold_gradients
from learner.training.entropy_control import EntropyControl
from learner.training.fit_memory import fit_memory
from learner.training.metrics import Mismatch, RatioRange
from learner.training.optimizer import make_optimizer, next_coef, require_finite_weights
from learner.training.warm_start import warm_start
from protocol.errors import ConfigError


class PolicyTrainer(msgspec.Struct, eq=False, kw_only=True):
    """The policy as prepared by accelerate, and everything trained with it."""

    run: LearnerRun
    model_path: Path
    """Directory of the model that the run started from."""
    model_digest: str
    accelerator: Accelerator
    policy: nn.Module
    published: PublishedPolicy
    optimizer: torch.optim.Optimizer
    reference: Reference | ServerReference | None
    kl_coef: float
    entropy: EntropyControl
    shape: ModelShape | None
    ratio_range: RatioRange = msgspec.field(default_factory=RatioRange)
    mismatch: Mismatch = msgspec.field(default_factory=Mismatch)
    num_skipped_in_a_row: int = 0
    """Number of consecutive updates skipped for a NaN or inf gradient, up to the latest update."""

    @property
    def config(self) -> LearnerConfig:
        return self.run.learner

    def position(self, version: int) -> str:
        """Return the run's position before it trains `version`; equal on all ranks."""
        reference = "" if self.reference is None else f", reference {self.reference.state.versions}"
        return f"step {version + 1}{reference}, {self.num_skipped_in_a_row} updates skipped"

    def after_step(self, version: int, metrics: dict[str, float]) -> dict[str, float]:
        """Update the entropy bonus, the KL coefficient and the reference after a step.

        The metrics hold the coefficients that the step used, and the version of the new reference.
        """
        used = {}
        if self.config.loss.has_entropy_bonus:
            used["loss/entropy_coef"] = self.entropy.weight(self.config.loss)
            self.entropy = self.entropy.after_step(self.config.loss, metrics.get("policy/entropy"))
        if self.reference is None:
            return used
        used_coef = self.kl_coef
        self.set_kl_coef(version, metrics.get("reference/kl"))
        refreshed = self.reference.after_step(self.policy, version, metrics)
        if refreshed and self.config.reference.reset_optimizer:
            self.optimizer.state.clear()
        return used | {
            "reference/kl_coef": used_coef,
            "reference/version": float(self.reference.version),
            "reference/refreshed": float(refreshed),
        }

    def set_kl_coef(self, version: int, measured_kl: float | None) -> None:
        """Set the KL coefficient for the step that trains `version`.

        Also called after a resume, because `steps` may have changed.
        """
        self.kl_coef = next_coef(
            self.config.kl, self.kl_coef, version=version, num_steps=self.config.steps, measured_kl=measured_kl
        )


class ForwardSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the policy's passes, measured on the loaded model."""

    attention: str
    """Name of the attention implementation."""
    logits: LogitMap


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs that each rank reads itself and that affect the run's results."""

    dtype: str
    head_dtype: str | None
    max_model_len: int | None
    seed: int
    learner: LearnerConfig
    model: str
    """Digest of the model's files."""
    plug_ins: str
    """Digest of the files of the user's objective and advantage."""
    device: str
    """Kind of device: cuda or cpu."""
    mesh: tuple[int, ...]
    """Mesh over which the policy is sharded. Each rank reads its number of nodes from its environment."""
    torch: str
    transformers: str


def make_trainer(run_inputs: RunInputs, accelerator: Accelerator, *, is_new: bool) -> PolicyTrainer:
    """Load the policy and build its optimizer and reference.

    The policy of a new run is warm-started, if configured, before the reference is copied from it. A resumed
    run restores everything from its checkpoint afterwards.
    """
    check_plug_ins(run_inputs.run.learner)
    experts = run_inputs.experts
    _refuse_sharded(run_inputs.run.learner, accelerator.num_processes)
    run = fit_memory(run_inputs, accelerator)
    config = run.learner
    assert config.sharding != "auto"
    shape = mesh_shape(config.sharding, accelerator.num_processes)
    require_agreement(
        accelerator,
        _view_of(run_inputs, run, accelerator, shape),
        "Give every rank the same config, model files and software",
    )
    policy = _load(run_inputs.model_path, run, accelerator, shape)
    compute_in(getattr(torch, run.dtype), policy)
    if run.has_float32_head:
        float32_heads.add(policy)
    optimizer = make_optimizer(policy, config.optimizer, config.optimizer.learning_rate)
    # accelerate would make copies of a sharded policy, too, agree by DDP.
    policy, optimizer = (policy, accelerator.prepare(optimizer)) if shape else accelerator.prepare(policy, optimizer)
    hold_gradients(policy)
    if config.compiles_on(accelerator.device.type):
        fuse(policy, getattr(torch, run.dtype), partial(first_problem, accelerator))
    if experts is not None:
        find_routers(accelerator.unwrap_model(policy), experts)
    if is_new and config.warm_start.steps > 0:
        warm_start(run_inputs, config, accelerator, policy)
    require_finite_weights(
        accelerator,
        policy,
        f"the weights of {run_inputs.model_path}, or of its warm start,",
        "set `model` to one with finite weights, or lower learner.warm_start.learning_rate",
    )
    return PolicyTrainer(
        run=run,
        model_path=run_inputs.model_path,
        model_digest=run_inputs.model_digest,
        accelerator=accelerator,
        policy=policy,
        published=PublishedPolicy(accelerator, policy, getattr(torch, run.dtype)),
        optimizer=optimizer,
        reference=_make_reference(run, policy, accelerator),
        kl_coef=config.kl.coef,
        entropy=EntropyControl(coef=config.loss.entropy_coef),
        shape=run_inputs.shape,
    )


def _make_reference(run: LearnerRun, policy: nn.Module, accelerator: Accelerator) -> Reference | ServerReference | None:
    config = run.learner.reference
    if config.kind == "none":
        return None
    if config.endpoint is not None:
        return ServerReference(config, run.checkpoint_dir, is_main=accelerator.is_main_process)
    return Reference(config, policy, accelerator, run.learner.sampling.temperature)


def _refuse_sharded(config: LearnerConfig, num_ranks: int) -> None:
    """Raise ConfigError for an optimizer that does not go with sharding. With "auto", it prevents sharding."""
    if num_ranks > 1 and config.sharding in ("full", "hybrid") and config.optimizer.kind == "adamw_8bit":
        raise ConfigError(
            f'learner.optimizer.kind = "adamw_8bit" with learner.sharding = "{config.sharding}": bitsandbytes cannot '
            'update sharded parameters. Set learner.optimizer.kind to "adamw", whose moments are sharded, or '
            'learner.sharding to "none"'
        )


def _view_of(run_inputs: RunInputs, run: LearnerRun, accelerator: Accelerator, mesh: tuple[int, ...]) -> RunView:
    return RunView(
        dtype=run.dtype,
        head_dtype=run.head_dtype,
        max_model_len=run.server.get("max_model_len"),
        seed=run.seed,
        learner=_without_places(run.learner),
        model=run_inputs.model_digest,
        plug_ins=digest_of_plug_ins(run.learner),
        device=accelerator.device.type,
        mesh=mesh,
        torch=str(torch.__version__),
        transformers=transformers.__version__,
    )


def _without_places(config: LearnerConfig) -> LearnerConfig:
    """Return the config without the keys that may differ per rank: its cores, and its node's path of a mount."""
    checkpoint = msgspec.structs.replace(config.checkpoint, dir=None)
    return msgspec.structs.replace(config, cpu_cores=None, checkpoint=checkpoint)


def _load(path: Path, run: LearnerRun, accelerator: Accelerator, mesh: tuple[int, ...]) -> Any:
    """Return the policy with its adapter and its attention, sharded over the mesh."""
    config, dtype = run.learner, getattr(torch, run.dtype)
    load = partial(
        load_policy,
        path,
        # Frozen weights receive no small updates, so they can have the server's dtype, at half the memory.
        dtype=dtype if config.lora.rank else torch.float32,
        gradient_checkpointing=config.gradient_checkpointing is True,
        attn_implementation=None if config.attn_implementation == PACKED else config.attn_implementation,
        max_model_len=run.server.get("max_model_len"),
    )
    with ExitStack() as files:
        reader = make_reader(partial(load, on_meta=True), files.enter_context(opened(path))) if mesh else None
        policy = load(on_meta=reader is not None)
        _settle_alike(policy, accelerator, run, reader)
        if config.lora.rank:
            with in_name_only(policy):
                add_adapter(policy, config.lora, run.seed)
        if mesh:
            shard(policy, mesh, accelerator.device.type, dtype)
        if reader is not None:
            allocate(policy, accelerator.device)
            reader.fill(held(policy))
    return policy


def _settle_alike(policy: Any, accelerator: Accelerator, run: LearnerRun, reader: CheckpointReader | None) -> None:
    """Apply rank 0's choice of passes on every rank, because each rounds in its own way.

    A policy without its weights is given those of the few layers that the choice needs.
    """

    def settle() -> ForwardSetup:
        with ExitStack() as weights:
            if reader is not None:
                weights.enter_context(few_layers(policy))
                weights.enter_context(filled(policy, reader))
            choose_attention(policy, accelerator.device, getattr(torch, run.dtype), run.learner.attn_implementation)
            logits = logit_maps.get(policy) or logit_map_of(policy)
        return ForwardSetup(attention=policy.config._attn_implementation, logits=logits)

    settled = decide_on_rank_0(accelerator, settle, ForwardSetup)
    if settled.attention != policy.config._attn_implementation:
        policy.set_attn_implementation(settled.attention)
    logit_maps[policy] = settled.logits
