"""Communication between the ranks of a learner: rank 0 shares the groups, every rank trains on its rows.

Groups are encoded as on the wire, in msgpack and raw frames, never pickled. All ranks take part in every pass
of a sharded policy, so each rank runs the same number of passes.
"""

import hashlib
import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from learner.config import LearnerConfig, LearnerRun
from learner.forward.attention import is_packed
from learner.forward.compile import describe_fused
from learner.policy.model import compute_dtype
from learner.policy.model_shape import tokens_per_key
from learner.policy.sharding import is_sharded
from learner.rank_agreement import broadcast_bytes, require_agreement
from learner.rank_watch import RankWatch
from learner.rollouts.rollout_group import RolloutGroup
from learner.training.batch import BatchRow, MicroBatch, micro_batch
from learner.training.packing import Layout, share_out, split_into_micro_batches
from protocol.codec import pack, unpack
from protocol.errors import ConfigError
from protocol.messages import Part

log = logging.getLogger(__name__)
PINNED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS":
        ("1", "every step makes one update of all its rows (learner.groups_per_step)"),
    "ACCELERATE_MIXED_PRECISION": ("no", "passes compute in the run's dtype (dtype)"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "learner.compile decides what is compiled"),
}  # fmt: skip
"""Environment variables of accelerate that `make_accelerator` overrides: the value it sets, and why."""
OWN_SHARDING = 'the learner shards the policy itself, with learner.sharding = "full" or "hybrid"'
REFUSED = {
    "ACCELERATE_USE_FSDP": OWN_SHARDING,
    "ACCELERATE_USE_DEEPSPEED": OWN_SHARDING,
    "ACCELERATE_USE_MEGATRON_LM": OWN_SHARDING,
    "ACCELERATE_USE_PARALLELISM_CONFIG": "only data parallelism is supported, sharded or not; tensor, context and "
    "sequence parallel groups would train on other rows and reduce their gradients over other ranks",
}
"""Environment variables that would change what is trained, each with the reason it is refused."""
UNSET = {"", "false", "0"}
DISAGREEMENT = (
    "No rank has changed its weights in this step. Give all ranks the same config, software and device type, then "
    "restart them, with --resume if the run has a checkpoint"
)


class StepBatch(Part):
    """Groups of one optimizer step, or None at the end of the run."""

    groups: list[RolloutGroup] | None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the passes that a rank is about to run for a step."""

    step: str
    attention: str
    """Name of the attention implementation."""
    layout: Layout
    compiled: str
    num_rows: int
    num_tokens: int
    rows: str
    """Digest of the rows in order: group, episode, prompt and completion tokens."""
    num_micro_batches: list[int]
    """Number of micro-batches of each rank."""
    micro_batches: str
    """Digest of the assignment of rows to micro-batches and ranks."""


def make_accelerator(*handlers: KwargsHandler) -> Accelerator:
    """Return an Accelerator without the environment's gradient and dtype settings.

    Raises:
        ConfigError: The environment requests a kind of parallelism that would give wrong gradients here.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    for name, reason in REFUSED.items():
        if (value := os.environ.get(name, "")).lower() not in UNSET:
            raise ConfigError(
                f"{name} = {value!r} in the environment is not supported: {reason}. Unset it, or remove it from "
                "accelerate's config"
            )
    for name, (value, reason) in PINNED.items():
        if is_first and (found := os.environ.get(name, value)).lower() != value:
            log.warning("ignoring %s = %s: %s", name, found, reason)
    return Accelerator(
        mixed_precision="no",  # see policy/model.py
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # Otherwise each rank holds its gradients twice (hold_gradients).
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True), *handlers],
    )


@contextmanager
def ranks_of(run: LearnerRun) -> Iterator[Accelerator]:
    """Join the other ranks, and leave them on exit.

    While rank 0 waits for the server, it signals this to the other ranks (policy/published.py), so their
    collectives do not time out.

    On exit the process group ends, because Gloo's threads abort a process that exits before them. A
    distributed model must not outlive the group: freeing it would free the group too, waiting with the GIL
    held for a thread that may need the GIL. Every frame that holds the model must therefore have returned.

    Raises:
        ConfigError: This process is one of several ranks but would train alone.
        SystemExit: Another rank has died, whatever error this caused here (rank_watch.py).
        RankFailed: Another rank has stopped with an error or hangs.
    """
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=run.learner.collective_timeout_s))
    accelerator = make_accelerator(timeout)
    if accelerator.num_processes > 1:
        log.info("rank %d of %d on %s", accelerator.process_index, accelerator.num_processes, accelerator.device)
    watch = RankWatch(accelerator)
    try:
        _require_all_ranks(accelerator)
        yield accelerator
        watch.part()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        if (cause := watch.cause_of(error)) is error:
            raise
        raise cause from None
    finally:
        accelerator.free_memory()
        accelerator.end_training()
        watch.close()


def _require_all_ranks(accelerator: Accelerator) -> None:
    """Raise ConfigError if this process was started as one of several ranks, but accelerate does not see the others."""
    num_ranks = os.environ.get("WORLD_SIZE", "")
    if num_ranks not in ("", str(accelerator.num_processes)):
        raise ConfigError(
            f"WORLD_SIZE = {num_ranks} in the environment, but this process would train alone: torch finds no GPU, or "
            "LOCAL_RANK is not set. Start ranks with torchrun and repair the driver, or set ACCELERATE_USE_CPU=true "
            "for ranks on CPUs"
        )


def share_groups(accelerator: Accelerator, groups: list[RolloutGroup] | None) -> list[RolloutGroup] | None:
    """Send rank 0's groups to every rank; the other ranks pass None."""
    if accelerator.num_processes == 1:
        return groups
    packed = pack(StepBatch(groups=groups)) if accelerator.is_main_process else b""
    return unpack(broadcast_bytes(accelerator, packed), StepBatch).groups


def my_batches(
    accelerator: Accelerator, policy: nn.Module, rows: list[BatchRow], config: LearnerConfig, step: str
) -> list[MicroBatch]:
    """Return this rank's micro-batches.

    With a sharded policy, masked micro-batches pad every rank to the same number. `step` names the step in
    errors.

    Raises:
        RanksDisagree: The ranks would train on different rows, or run their passes differently.
    """
    layout = layout_of(accelerator, policy, config)
    shares = [split_into_micro_batches(share, layout) for share in share_out(rows, accelerator.num_processes, layout)]
    if accelerator.num_processes > 1:
        model: Any = accelerator.unwrap_model(policy)
        require_agreement(accelerator, plan_of(model, rows, shares, layout, step), DISAGREEMENT)
    batches = [micro_batch(cut_rows, accelerator.device) for cut_rows in shares[accelerator.process_index]]
    # Every rank takes part in the backward pass, and in every pass of a sharded policy.
    least = max(1, *map(len, shares)) if is_sharded(policy) else 1
    return batches + [micro_batch([], accelerator.device) for _ in range(least - len(batches))]


def plan_of(
    model: Any, rows: list[BatchRow], shares: Sequence[list[list[BatchRow]]], layout: Layout, step: str
) -> StepPlan:
    """Return this rank's plan; `shares` are the micro-batches of every rank."""
    index_of = {id(row): index for index, row in enumerate(rows)}
    content, micro_batches = hashlib.sha256(), hashlib.sha256()
    for row in rows:
        content.update(b"%d,%d,%d;" % (row.group, row.episode, len(row.prompt_token_ids)))
        content.update(row.prompt_token_ids.tobytes())
        content.update(row.branch.token_ids.tobytes())
    micro_batches.update(
        msgspec.json.encode([[[index_of[id(row)] for row in batch] for batch in share] for share in shares])
    )
    return StepPlan(
        step=step,
        attention=model.config._attn_implementation,
        layout=layout,
        compiled=describe_fused(model),
        num_rows=len(rows),
        num_tokens=sum(row.num_tokens for row in rows),
        rows=content.hexdigest()[:16],
        num_micro_batches=[len(share) for share in shares],
        micro_batches=micro_batches.hexdigest()[:16],
    )


def layout_of(accelerator: Accelerator, policy: nn.Module, config: LearnerConfig) -> Layout:
    """Return how the policy's passes arrange rows, given its attention and its shape."""
    model: Any = accelerator.unwrap_model(policy)
    text = model.config.get_text_config()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # 2 operations per parameter and token. Per dimension, layer and token pair, 4 operations: the score and
    # the share of the value.
    pair_cost = 2 * text.num_hidden_layers * text.hidden_size / num_parameters
    return Layout(
        max_tokens=config.tokens_per_pass(accelerator.device.type),
        is_packed=is_packed(model),
        pair_cost=pair_cost,
        key_size=key_size_of(model) if is_packed(model) and accelerator.device.type != "cpu" else 0.0,
    )


def key_size_of(model: Any) -> float:
    """Return the memory of a key that a packed pass on a GPU gathers, in tokens. A CPU keeps none."""
    dtype = str(compute_dtype(model)).removeprefix("torch.")
    return tokens_per_key(model.config.get_text_config(), dtype, is_checkpointed=model.is_gradient_checkpointing)


def gradient_sync(accelerator: Accelerator, policy: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """Return the context for the forward and backward pass of one micro-batch.

    Gradients are reduced over the ranks with the last micro-batch only. A sharded policy reduces them with
    every micro-batch, because until then each rank holds the gradient of the whole model; but over the nodes
    that hold copies of its shards, with the last one only.
    """
    if is_sharded(policy):
        policy.set_requires_all_reduce(is_last)
        return nullcontext()
    return nullcontext() if is_last else accelerator.no_sync(policy)


def hold_gradients(policy: nn.Module) -> None:
    """Give every parameter of an unsharded policy on several ranks a zero gradient in DDP's buckets.

    Micro-batches then add to these from the first one on. A gradient that a micro-batch creates would exist alongside
    its bucket. DDP arranges its buckets anew in the second forward pass, which would hold both arrangements, so two
    passes without the model come before there is anything else.
    """
    if not isinstance(policy, DistributedDataParallel):
        return
    model, policy.module = policy.module, _NoGradient(policy.module)
    try:
        for _ in range(2):
            policy.zero_grad()
            policy(0.0).backward()
    finally:
        policy.module = model


def clear_gradients(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Free the gradients, or zero those that `hold_gradients` has placed."""
    optimizer.zero_grad(set_to_none=not isinstance(policy, DistributedDataParallel))


class _NoGradient(nn.Module):
    """A model whose result depends on every trained parameter, with a gradient of zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, scale: float) -> torch.Tensor:
        sums = [parameter.sum() for parameter in self._model.parameters() if parameter.requires_grad]
        return scale * torch.stack(sums).sum()
