"""Logprobs of the policy and the reference for a step's tokens, computed before its first update.

All reference logprobs of a step use the same reference. The policy's logprobs are those at the start of the
step, so later updates of the step never mix anchors. No gradients are computed.

Suffixes: B branches, T tokens of the longest, N episodes of the step.
"""

import msgspec
import torch

from learner.algorithm.kl import MEASURE, clamped, kl_estimate, masked
from learner.algorithm.objectives import PICKS
from learner.forward.lm_head import EntropyUse
from learner.forward.logprobs import Answer, token_logprobs
from learner.policy.reference import Reference
from learner.training.batch import MicroBatch
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer
from learner.training.token_selection import of_highest_entropy, picked


def precompute_logprobs(
    trainer: PolicyTrainer, batches: list[MicroBatch], version: int, timer: StepTimer
) -> list[MicroBatch]:
    """Return the micro-batches of the step that trains `version`, with the logprobs and masks that the loss needs."""
    config = trainer.config
    if trainer.reference is not None and config.kl.place != "reward":
        with timer("reference"):
            logprobs = _reference_logprobs(trainer, batches)
        batches = [
            msgspec.structs.replace(batch, reference_logprobs_BT=logprobs_BT)
            for batch, logprobs_BT in zip(batches, logprobs, strict=True)
        ]
    needs_proximal = (
        config.updates_per_batch > 1
        and config.off_policy_correction.anchor_used == "proximal"
        and config.off_policy_correction.proximal == "exact"
    )
    needs_entropy, needs_picks = config.loss.top_entropy_frac < 1, config.loss.objective in PICKS
    if not (needs_proximal or needs_entropy or needs_picks):
        return batches
    with timer("policy_pass"):
        started = _policy_pass(trainer, batches, "value" if needs_entropy else "none")
    logprobs = [logprobs_BT for logprobs_BT, _ in started]
    if needs_proximal:
        batches = [
            msgspec.structs.replace(batch, proximal_logprobs_BT=logprobs_BT)
            for batch, logprobs_BT in zip(batches, logprobs, strict=True)
        ]
    if needs_entropy:
        entropies = [entropy_BT for _, entropy_BT in started if entropy_BT is not None]
        batches = [
            msgspec.structs.replace(batch, policy_mask_BT=mask_BT)
            for batch, mask_BT in zip(batches, of_highest_entropy(trainer, batches, entropies), strict=True)
        ]
    if needs_picks:
        batches = [
            msgspec.structs.replace(batch, picked_BT=picked_BT)
            for batch, picked_BT in zip(batches, picked(trainer, batches, logprobs, version), strict=True)
        ]
    return batches


def episode_kls(
    trainer: PolicyTrainer, batches: list[MicroBatch], num_episodes: int, timer: StepTimer
) -> tuple[list[float], float]:
    """Return each episode's KL and the step's mean KL per token, over all ranks.

    An episode's KL is the sum over its sampled tokens, indexed by its number in the step. The mean is
    `reference/kl`.
    """
    accelerator = trainer.accelerator
    kls_N = torch.zeros(num_episodes, dtype=torch.float64, device=accelerator.device)
    measured = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    with timer("policy_pass"):
        started = _policy_pass(trainer, batches, "none")
    with timer("reference"):
        references = _reference_logprobs(trainer, batches)
    for batch, (logprobs_BT, _), reference_BT in zip(batches, started, references, strict=True):
        mask_BT = batch.mask_BT
        d_BT = clamped(masked(reference_BT, mask_BT) - masked(logprobs_BT, mask_BT))
        kls_B = kl_estimate(d_BT, trainer.config.kl.estimator_used).sum(dim=1).double()
        kls_N.index_add_(0, batch.episodes_B, kls_B)
        measured += torch.stack([kl_estimate(d_BT, MEASURE).sum().double(), mask_BT.sum().double()])
    kls_N, (kl, num_tokens) = accelerator.reduce(kls_N, "sum"), accelerator.reduce(measured, "sum").tolist()
    return kls_N.tolist(), kl / max(num_tokens, 1.0)


def _reference_logprobs(trainer: PolicyTrainer, batches: list[MicroBatch]) -> list[torch.Tensor]:
    """Return the reference's logprobs_BT of every micro-batch: from a pass, or as its server has sent them."""
    if isinstance(trainer.reference, Reference):
        return trainer.reference.logprobs(trainer.policy, [batch.pack for batch in batches])
    return [_sent_logprobs(batch) for batch in batches]


def _sent_logprobs(batch: MicroBatch) -> torch.Tensor:
    if batch.reference_logprobs_BT is not None:
        return batch.reference_logprobs_BT
    # A micro-batch without rows, which only keeps the ranks in step.
    assert not batch.mask_BT.any(), "rows without the logprobs of the reference's server"
    return torch.zeros_like(batch.behavior_logprobs_BT)


@torch.no_grad()
def _policy_pass(trainer: PolicyTrainer, batches: list[MicroBatch], entropy: EntropyUse) -> list[Answer]:
    """Return (logprobs_BT, entropy_BT) of every micro-batch.

    Runs the unwrapped model, because under DDP ranks may have different numbers of micro-batches.
    """
    policy = trainer.accelerator.unwrap_model(trainer.policy)
    temperature = trainer.config.sampling.temperature
    return [
        token_logprobs(policy, batch.pack, temperature, entropy=entropy, routing=batch.routing) for batch in batches
    ]
