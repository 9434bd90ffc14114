"""Logprobs of the policy and the reference for a step's tokens, computed before its first update.

All reference logprobs of a step use the same reference. The policy's logprobs are those at the start of the
step, so later updates of the step never mix anchors. No gradients are computed.

Suffixes: B branches, T tokens of the longest, N episodes of the step.
"""

import msgspec
import torch

from learner.algorithm.kl import MEASURE, clamped, kl_estimate, masked
from learner.forward.lm_head import EntropyUse
from learner.forward.logprobs import Answer, token_logprobs
from learner.training.batch import MicroBatch
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer


def precompute_logprobs(trainer: PolicyTrainer, batches: list[MicroBatch], timer: StepTimer) -> list[MicroBatch]:
    """Return the micro-batches with the extra logprobs and mask that the loss needs."""
    config = trainer.config
    if trainer.reference is not None and config.kl.place == "loss":
        with timer("reference"):
            logprobs = trainer.reference.logprobs(trainer.policy, [batch.pack for batch in batches])
        batches = [
            msgspec.structs.replace(batch, reference_logprobs_BT=logprobs_BT)
            for batch, logprobs_BT in zip(batches, logprobs, strict=True)
        ]
    needs_proximal = (
        config.updates_per_batch > 1
        and config.off_policy_correction.anchor == "proximal"
        and config.off_policy_correction.proximal == "exact"
    )
    if not needs_proximal and config.loss.top_entropy_frac == 1:
        return batches
    with timer("policy_pass"):
        started = _policy_pass(trainer, batches, "value" if config.loss.top_entropy_frac < 1 else "none")
    if needs_proximal:
        batches = [
            msgspec.structs.replace(batch, proximal_logprobs_BT=logprobs_BT)
            for batch, (logprobs_BT, _) in zip(batches, started, strict=True)
        ]
    if config.loss.top_entropy_frac < 1:
        entropies = [entropy_BT for _, entropy_BT in started if entropy_BT is not None]
        floor = _entropy_floor(trainer, batches, entropies)
        batches = [
            msgspec.structs.replace(batch, policy_mask_BT=entropy_BT >= floor)
            for batch, entropy_BT in zip(batches, entropies, strict=True)
        ]
    return batches


def episode_kls(
    trainer: PolicyTrainer, batches: list[MicroBatch], num_episodes: int, timer: StepTimer
) -> tuple[list[float], float]:
    """Return each episode's KL and the step's mean KL per token, over all ranks.

    An episode's KL is the sum over its sampled tokens, indexed by its place in the step. The mean is
    `reference/kl`.
    """
    accelerator = trainer.accelerator
    kls_N = torch.zeros(num_episodes, dtype=torch.float64, device=accelerator.device)
    measured = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    assert trainer.reference is not None
    with timer("policy_pass"):
        started = _policy_pass(trainer, batches, "none")
    with timer("reference"):
        references = trainer.reference.logprobs(trainer.policy, [batch.pack for batch in batches])
    for batch, (logprobs_BT, _), reference_BT in zip(batches, started, references, strict=True):
        mask_BT = batch.mask_BT
        d_BT = clamped(masked(reference_BT, mask_BT) - masked(logprobs_BT, mask_BT))
        kls_B = kl_estimate(d_BT, trainer.config.kl.estimator_used).sum(dim=1).double()
        kls_N.index_add_(0, batch.places_B, kls_B)  # all branches of an episode have the same place
        measured += torch.stack([kl_estimate(d_BT, MEASURE).sum().double(), mask_BT.sum().double()])
    kls_N, (kl, num_tokens) = accelerator.reduce(kls_N, "sum"), accelerator.reduce(measured, "sum").tolist()
    return kls_N.tolist(), kl / max(num_tokens, 1.0)


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


def _entropy_floor(trainer: PolicyTrainer, batches: list[MicroBatch], entropies: list[torch.Tensor]) -> float:
    """Return the entropy threshold for top_entropy_frac of the step's trained tokens.

    The threshold is over all ranks.
    """
    accelerator = trainer.accelerator
    trained = [entropy_BT[batch.mask_BT] for batch, entropy_BT in zip(batches, entropies, strict=True)]
    everyone = accelerator.gather(accelerator.pad_across_processes(torch.cat(trained), pad_index=-torch.inf))
    everyone = everyone[everyone > -torch.inf]
    if not len(everyone):
        return 0.0
    num_kept = max(1, round(trainer.config.loss.top_entropy_frac * len(everyone)))
    return everyone.topk(num_kept).values[-1].item()
