"""One optimizer step: from the groups of a batch to updated weights and metrics.

    groups ─▶ advantages ─▶ rows ─▶ micro-batches ─▶ precompute_logprobs
           ─▶ updates_per_batch × (forward, backward, optimizer)

Every rank runs this with the same groups, each on its share of the rows. Sums over ranks are equal on all
ranks.
Suffixes: B branches, T tokens of the longest branch, N episodes of the step, _P groups (prompts) of the step,
_G episodes of a group, _K turns of an episode.
"""

import logging
import math
from itertools import islice

import msgspec
import torch

from learner.algorithm.credit import AdvantagesByTurn, advantages_by_turn
from learner.algorithm.kl import masked
from learner.algorithm.loss import NUM_LENGTH_QUARTERS, LossInputs, Sums, policy_loss, token_advantages
from learner.algorithm.plug_in import advantages_of
from learner.config import LearnerConfig
from learner.forward.lm_head import EntropyUse
from learner.forward.logprobs import token_logprobs
from learner.rollouts.rollout_group import RolloutGroup, step_rewards
from learner.training.batch import BatchRow, MicroBatch, step_rows, trained_rows
from learner.training.distributed import clear_gradients, gradient_sync, layout_of, my_batches
from learner.training.metrics import TERA, StepTimer, loss_metrics, routing_sums, train_flops
from learner.training.optimizer import NotFiniteError, learning_rate, require_finite_weights
from learner.training.packing import pieces_of
from learner.training.policy_trainer import PolicyTrainer
from learner.training.precompute import episode_kls, precompute_logprobs
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


def train_on(trainer: PolicyTrainer, groups: list[RolloutGroup], version: int, timer: StepTimer) -> dict[str, float]:
    """Train the weights of `version` on one batch; return the finite metrics.

    The metrics cover the tokens of all ranks.

    Raises:
        NotFiniteError: The weights are NaN or inf, or too many updates in a row were skipped.
    """
    accelerator, config = trainer.accelerator, trainer.config
    metrics: dict[str, float] = {}
    if config.kl.place == "reward":
        groups, metrics["reference/kl"] = apply_kl_penalty(trainer, groups, version, timer)
    with timer("batch"):
        advantages_P_G_K = advantages(groups, config)
        rows = trained_rows(groups, advantages_P_G_K, config)
        batches = my_batches(accelerator, trainer.policy, rows, config, trainer.position(version))
    batches = precompute_logprobs(trainer, batches, version, timer)
    total: Sums = {}
    num_skipped = 0
    for update in range(config.updates_per_batch):
        with timer("forward_backward"):
            sums = forward_backward(trainer, batches, version, is_first_update=update == 0)
            total = _added(total, sums)
        with timer("optimizer"):
            metrics |= optimizer_step(trainer, version)
        num_skipped += trainer.num_skipped_in_a_row > 0
    require_finite_weights(
        accelerator,
        trainer.policy,
        _describe_weights(version, metrics),
        "lower learner.optimizer.learning_rate, then continue with --resume",
    )
    total = {name: accelerator.reduce(value, "sum") for name, value in total.items()}
    metrics = (
        loss_metrics(total, config) | trainer.ratio_range.pop_metrics(accelerator, config.updates_per_batch) | metrics
    )
    metrics["batch/trained_frac"] = sum(row.branch.num_sampled for row in rows) / sum(one.num_tokens for one in groups)
    metrics["perf/train_tflop"] = train_tflop(trainer, rows)
    metrics["optim/skipped_updates"] = float(num_skipped)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def train_tflop(trainer: PolicyTrainer, rows: list[BatchRow]) -> float:
    """Return the step's arithmetic on all ranks, in TFLOP."""
    if trainer.shape is None:
        return math.nan
    layout = layout_of(trainer.accelerator, trainer.policy, trainer.config)
    return train_flops(trainer.shape, pieces_of(rows, layout)) * trainer.config.updates_per_batch / TERA


def advantages(groups: list[RolloutGroup], config: LearnerConfig) -> AdvantagesByTurn:
    """Return the advantage of every turn of one step's groups.

    The config's built-in rule or the user's own function computes them.

    Raises:
        ConfigError: The function tells turns apart, and the objective's ratio covers the whole completion.
    """
    if not config.reward.is_learned_from:  # the KL is the advantage of each token
        return [[[0.0]] * len(group.rewards_G) for group in groups]
    rewards = step_rewards(groups, config.reward)
    function = config.advantage.function
    if function is None:
        return advantages_by_turn(rewards, config.advantage)
    found = advantages_of(function, rewards)
    if config.loss.is_of_completion and any(len(set(advantages_K)) > 1 for G in found for advantages_K in G):
        raise ConfigError(
            f"learner.advantage.function = {function!r} returned different advantages for the turns of an episode, but "
            f'the ratio of learner.loss.objective = "{config.loss.objective}" covers the whole completion, so it would '
            "spread each of them over all turns; return one number for each completion, then continue with --resume, "
            "or choose another objective in a new run"
        )
    return found


def apply_kl_penalty(
    trainer: PolicyTrainer, groups: list[RolloutGroup], version: int, timer: StepTimer
) -> tuple[list[RolloutGroup], float]:
    """Subtract kl_coef times its KL from each episode's reward.

    Also returns the mean KL per token.
    """
    rows_P_G = step_rows(groups, [[[0.0]] * len(group.rewards_G) for group in groups], trainer.config)
    rows = [row for rows_G in rows_P_G for row in rows_G]
    batches = my_batches(trainer.accelerator, trainer.policy, rows, trainer.config, trainer.position(version))
    num_episodes = sum(len(group.rewards_G) for group in groups)
    kls_N, kl_per_token = episode_kls(trainer, batches, num_episodes, timer)
    kls = iter(kls_N)
    shaped = [
        msgspec.structs.replace(
            group,
            rewards_G=[
                None if reward is None else reward - trainer.kl_coef * kl
                for reward, kl in zip(group.rewards_G, islice(kls, len(group.rewards_G)), strict=True)
            ],
        )
        for group in groups
    ]
    return shaped, kl_per_token


def forward_backward(trainer: PolicyTrainer, batches: list[MicroBatch], version: int, *, is_first_update: bool) -> Sums:
    """Accumulate the gradient of the step's loss; return sums over this rank's tokens."""
    accelerator = trainer.accelerator
    total: Sums = {}
    for i, batch in enumerate(batches):
        with gradient_sync(accelerator, trainer.policy, is_last=i == len(batches) - 1):
            loss, sums = _micro_batch_loss(trainer, batch, version, is_first_update=is_first_update)
            # accelerate averages gradients over the ranks, but the loss is already a share of the global
            # token mean.
            accelerator.backward(loss * accelerator.num_processes)
        total = _added(total, sums)
    return total


def optimizer_step(trainer: PolicyTrainer, version: int) -> dict[str, float]:
    """Update the weights, or skip the update if the gradient norm is NaN or inf.

    Raises:
        NotFiniteError: Too many updates in a row were skipped.
    """
    config = trainer.config
    rate = learning_rate(config.optimizer, version, config.steps)
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    # clip_grad_norm_ reads the reduced gradients, so the norm is equal on all ranks.
    grad_norm = float(
        trainer.accelerator.clip_grad_norm_(trainer.policy.parameters(), config.optimizer.max_grad_norm) or 0.0
    )
    if math.isfinite(grad_norm):
        trainer.optimizer.step()
        trainer.num_skipped_in_a_row = 0
    else:
        _skip(trainer, version, grad_norm)
    clear_gradients(trainer.policy, trainer.optimizer)
    return {"optim/grad_norm": grad_norm, "optim/lr": rate}


def _skip(trainer: PolicyTrainer, version: int, grad_norm: float) -> None:
    trainer.num_skipped_in_a_row += 1
    limit = trainer.config.optimizer.max_skipped_updates
    reason = (
        f"the gradient norm is {grad_norm}: the loss or gradient overflowed, or the policy returned NaN or inf logprobs"
    )
    if trainer.num_skipped_in_a_row >= limit:
        raise NotFiniteError(
            f"step {version + 1}: {reason}, {limit} times in a row (learner.optimizer.max_skipped_updates). All these "
            "updates were skipped, and the checkpoints are intact. Lower learner.optimizer.learning_rate, or set "
            "learner.off_policy_correction if policy/ratio_max grew before, then continue with --resume; or start a "
            'new run with dtype = "float32"'
        )
    if trainer.accelerator.is_main_process:
        log.warning(
            "skipping the update of step %d: %s (%d in a row, the run stops at %d)",
            version + 1, reason, trainer.num_skipped_in_a_row, limit,
        )  # fmt: skip


def _describe_weights(version: int, metrics: dict[str, float]) -> str:
    return (
        f"step {version + 1} was too large (learning rate {metrics['optim/lr']:g}, gradient norm "
        f"{metrics['optim/grad_norm']:g}): its weights, which were neither sent to a server nor saved,"
    )


def _micro_batch_loss(
    trainer: PolicyTrainer, batch: MicroBatch, version: int, *, is_first_update: bool
) -> tuple[torch.Tensor, Sums]:
    config = trainer.config
    entropy_coef = trainer.entropy.weight(config.loss)
    entropy_use: EntropyUse = "gradient" if entropy_coef > 0 else "value"
    logprobs_BT, entropy_BT = token_logprobs(
        trainer.policy, batch.pack, config.sampling.temperature, entropy=entropy_use, routing=batch.routing
    )
    inputs = _loss_inputs(config, batch, version, logprobs_BT, entropy_BT)
    loss, sums = policy_loss(
        inputs, config.loss, config.off_policy_correction, config.kl, trainer.kl_coef, entropy_coef
    )
    return loss, sums | _diagnostics(trainer, batch, version, inputs, loss, is_first_update=is_first_update)


def _loss_inputs(
    config: LearnerConfig, batch: MicroBatch, version: int, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor | None
) -> LossInputs:
    lengths_B = batch.mask_BT.sum(dim=1)
    return LossInputs(
        logprobs_BT=logprobs_BT,
        behavior_logprobs_BT=batch.behavior_logprobs_BT,
        staleness_BT=(version - batch.versions_BT).clamp(min=0),
        advantages_BT=batch.advantages_BT,
        weights_B=batch.weights_B,
        mask_BT=batch.mask_BT,
        proximal_logprobs_BT=batch.proximal_logprobs_BT,
        # With the KL in the reward, only rows from the reference's server have them, and a rank without rows has none:
        # all ranks must reduce the same sums.
        reference_logprobs_BT=None if config.kl.place == "reward" else batch.reference_logprobs_BT,
        entropy_BT=entropy_BT,
        policy_mask_BT=batch.policy_mask_BT,
        picked_BT=batch.picked_BT,
        length_quarter_B=((lengths_B - 1).clamp(min=0) * NUM_LENGTH_QUARTERS // config.sampling.max_tokens).clamp(
            max=NUM_LENGTH_QUARTERS - 1  # an episode of several turns may exceed max_tokens
        ),
    )


def _diagnostics(
    trainer: PolicyTrainer, batch: MicroBatch, version: int, inputs: LossInputs, loss: torch.Tensor, *,
    is_first_update: bool,
) -> Sums:  # fmt: skip
    """Update the trainer's ratio range and mismatch, and return the sums that are no part of the loss."""
    assert inputs.entropy_BT is not None
    logprobs_BT, entropy_BT = inputs.logprobs_BT.detach(), inputs.entropy_BT.detach()
    # Count only completions that this version sampled whole, prompt included. Older tokens leave KV cache
    # entries of older weights behind.
    is_fresh_B = ((batch.versions_BT == version) | ~batch.mask_BT).all(dim=1) & (batch.entered_versions_B == version)
    fresh_BT = batch.mask_BT & is_fresh_B.unsqueeze(1) & is_first_update
    mismatch_BT = (logprobs_BT - batch.behavior_logprobs_BT).abs()
    log_ratio_BT = masked(logprobs_BT - batch.behavior_logprobs_BT, batch.mask_BT)
    # How strongly each token moves the policy. The gradient stops at the logprobs, so it costs next to
    # nothing.
    (pull_BT,) = torch.autograd.grad(loss, inputs.logprobs_BT, retain_graph=True)
    advantages_BT = token_advantages(inputs, trainer.config.kl, trainer.kl_coef)
    trainer.ratio_range.update(log_ratio_BT, pull_BT.abs(), (batch.weights_B.unsqueeze(1) * advantages_BT).abs())
    trainer.mismatch.update(batch.episodes_B, fresh_BT, mismatch_BT)
    sums = {
        "entropy": torch.where(batch.mask_BT, entropy_BT, 0.0).sum(),
        "fresh_tokens": fresh_BT.sum().float(),
        "fresh_mismatch": torch.where(fresh_BT, mismatch_BT, 0.0).sum(),
    }
    return sums | (routing_sums(batch) if trainer.config.routing_replay else {})


def _added(total: Sums, sums: Sums) -> Sums:
    return {name: total.get(name, 0.0) + value for name, value in sums.items()}
