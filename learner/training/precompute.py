"""Logprobs of the policy and the reference for a step's tokens, computed before its first update.

All reference logprobs of a step use the same reference. The policy's logprobs are those at the start of the
step, so later updates of the step never mix anchors. No gradients are computed.

Suffixes: B branches, T tokens of the longest, N episodes of the step.
"""

from collections.abc import Iterable

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
            batches = _with(batches, "reference_logprobs_BT", _reference_logprobs(trainer, batches))
    correction = config.off_policy_correction
    needs_proximal = (
        config.updates_per_batch > 1 and correction.anchor_used == "proximal" and correction.proximal == "exact"
    )
    needs_entropy, needs_picks = config.loss.top_entropy_frac < 1, config.loss.objective in PICKS
    if not (needs_proximal or needs_entropy or needs_picks):
        return batches
    with timer("policy_pass"):
        answers = _policy_pass(trainer, batches, "value" if needs_entropy else "none")
    logprobs = [logprobs_BT for logprobs_BT, _ in answers]
    if needs_proximal:
        batches = _with(batches, "proximal_logprobs_BT", logprobs)
    if needs_entropy:
        entropies = [entropy_BT for _, entropy_BT in answers if entropy_BT is not None]
        batches = _with(batches, "policy_mask_BT", of_highest_entropy(trainer, batches, entropies))
    if needs_picks:
        batches = _with(batches, "picked_BT", picked(trainer, batches, logprobs, version))
    return batches


def _with(batches: list[MicroBatch], field: str, values: Iterable[torch.Tensor]) -> list[MicroBatch]:
    """Return the micro-batches, each with its value of a field."""
    return [msgspec.structs.replace(batch, **{field: value}) for batch, value in zip(batches, values, strict=True)]


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
