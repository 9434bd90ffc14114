"""Selection of tokens over a whole step: those of highest entropy, and those that an objective picks.

    values of this rank's trained tokens ─▶ all ranks ─▶ choice over the step ─▶ one mask per micro-batch

Every rank makes the choice from the same values. The choice therefore does not depend on micro-batches or ranks,
apart from the rounding of the values: a share of a micro-batch would change with the memory of the device, and
would be at least one token of each.

Suffixes: B branches, T tokens of the longest, N trained tokens of all ranks, M of this rank.
"""

from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator

from learner.algorithm.correction import anchor_logprobs
from learner.algorithm.kl import clamped, masked
from learner.algorithm.objectives import PICKS, StepTokens
from learner.training.batch import MicroBatch
from learner.training.policy_trainer import PolicyTrainer


def of_highest_entropy(
    trainer: PolicyTrainer, batches: list[MicroBatch], entropies: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return, for each micro-batch, which of its trained tokens are in the top_entropy_frac of the step."""

    def choose(entropy_N: torch.Tensor) -> torch.Tensor:
        num_kept = max(1, round(trainer.config.loss.top_entropy_frac * len(entropy_N)))
        return entropy_N >= entropy_N.topk(num_kept).values[-1]

    return _chosen(trainer.accelerator, [batch.mask_BT for batch in batches], choose, entropies)


def picked(
    trainer: PolicyTrainer, batches: list[MicroBatch], logprobs: list[torch.Tensor], version: int
) -> list[torch.Tensor]:
    """Return, for each micro-batch, the tokens that the objective picks, given the logprobs at the step's start."""
    config = trainer.config.loss
    masks = [batch.mask_BT for batch in batches]
    columns: list[list[torch.Tensor]] = [[], [], [], []]
    for batch, started_BT in zip(batches, logprobs, strict=True):
        mask_BT = batch.mask_BT
        logprobs_BT, behavior_BT = masked(started_BT, mask_BT), masked(batch.behavior_logprobs_BT, mask_BT)
        staleness_BT = masked((version - batch.versions_BT).clamp(min=0), mask_BT)
        anchor_BT = anchor_logprobs(
            logprobs_BT, behavior_BT, logprobs_BT, staleness_BT, trainer.config.off_policy_correction
        )
        values = (
            clamped(logprobs_BT - anchor_BT),
            logprobs_BT,
            masked(batch.advantages_BT, mask_BT),
            _random(batch, trainer.run.seed, version),
        )
        for column, values_BT in zip(columns, values, strict=True):
            column.append(values_BT)
    return _chosen(
        trainer.accelerator, masks, lambda *step: PICKS[config.objective](StepTokens(*step), config), *columns
    )


def _chosen(
    accelerator: Accelerator,
    masks: list[torch.Tensor],
    choose: Callable[..., torch.Tensor],
    *columns: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Apply `choose` to the values of all trained tokens of the step; return the choice per micro-batch."""
    mine_MC = torch.stack(
        [
            torch.cat([values_BT[mask_BT] for values_BT, mask_BT in zip(column, masks, strict=True)]).double()
            for column in columns
        ],
        dim=1,
    )
    num_mine = torch.tensor([len(mine_MC)], device=accelerator.device)
    counts = accelerator.gather(num_mine).tolist()
    longest = max(counts)
    if not longest:  # on every rank, so that none waits in the second gather
        return [torch.zeros_like(mask_BT) for mask_BT in masks]
    padded_MC = torch.nn.functional.pad(mine_MC, (0, 0, 0, longest - len(mine_MC)))
    everyone_NC = accelerator.gather(padded_MC).view(-1, longest, len(columns))
    step_NC = torch.cat([of_rank_MC[:count] for of_rank_MC, count in zip(everyone_NC, counts, strict=True)])
    chosen_M = choose(*step_NC.unbind(dim=1)).split(counts)[accelerator.process_index]
    found = []
    for mask_BT, of_batch in zip(masks, chosen_M.split([int(mask_BT.sum()) for mask_BT in masks]), strict=True):
        found.append(torch.zeros_like(mask_BT).masked_scatter(mask_BT, of_batch))
    return found


def _random(batch: MicroBatch, seed: int, version: int) -> torch.Tensor:
    """Return a uniform random number for each token, by its episode's number in the step and its index."""
    num_tokens = batch.mask_BT.shape[1]
    random_BT = np.stack(
        [np.random.default_rng([seed, version, episode]).random(num_tokens) for episode in batch.episodes_B.tolist()]
    )
    return torch.from_numpy(random_BT).to(batch.mask_BT.device)
