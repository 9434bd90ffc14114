"""Conversion of scored groups to rows, and of rows to the tensors of a forward pass.

packing.py, between the two, decides which rows share a pass.

Suffixes: P groups, G episodes of a group, K turns of an episode, B rows (branches; a single-turn episode has one
branch, its completion), T tokens of the longest branch. Index t of a _BT tensor belongs to token t of its branch.
"""

from itertools import count, groupby

import msgspec
import numpy as np
import torch

from learner.algorithm.credit import AdvantagesByTurn
from learner.config import LearnerConfig
from learner.config.objectives import Normalization
from learner.environments.episode import NOT_SAMPLED, UNKNOWN_VERSION, TokenSequence
from learner.forward.pack import Pack, pack_trees
from learner.forward.replay import Routing, lay_out
from learner.rollouts.rollout_group import RolloutGroup


class BatchRow(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One branch with its prompt."""

    prompt_token_ids: np.ndarray
    branch: TokenSequence
    group: int
    """Number of the row's group. Adjacent rows with the same number have the group's prompt, or a later
    prompt of its episodes."""
    episode: int
    """Index of the row's episode among all episodes of the step."""
    advantage: float | np.ndarray
    """Advantage of the row's tokens: one for all, or one for each."""
    weight: float
    """Weight of each of the row's sampled tokens in the loss of the step."""
    entered_version: int
    prompt_experts: np.ndarray | None = None
    """Routed experts of the prompt. None: the policy's routers choose for the whole row."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.branch.token_ids)

    @property
    def experts(self) -> np.ndarray | None:
        """Routed experts of the row's first tokens, the prompt included."""
        if self.prompt_experts is None or self.branch.experts is None:
            return None
        return np.concatenate([self.prompt_experts, self.branch.experts])

    @property
    def num_before_last_sampled(self) -> int:
        """Number of tokens on which a sampled token depends."""
        return len(self.prompt_token_ids) + int(np.flatnonzero(self.branch.is_sampled_T).max(initial=0))


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Inputs of one forward pass and its loss, on the learner's device."""

    pack: Pack
    mask_BT: torch.Tensor
    behavior_logprobs_BT: torch.Tensor
    versions_BT: torch.Tensor
    entered_versions_B: torch.Tensor
    episodes_B: torch.Tensor
    advantages_BT: torch.Tensor
    weights_B: torch.Tensor
    routing: Routing | None = None
    """Server's choice of experts. None: the policy's routers choose."""
    num_unreplayed: int = 0
    """Number of tokens for which they choose although a sampled token follows."""
    proximal_logprobs_BT: torch.Tensor | None = None
    reference_logprobs_BT: torch.Tensor | None = None
    """Logprobs that arrived with the rows from the reference's server, or are from precompute_logprobs."""
    policy_mask_BT: torch.Tensor | None = None
    picked_BT: torch.Tensor | None = None
    """Mask from precompute_logprobs, like the one above and the proximal logprobs; each is set only if the loss
    needs it."""


def step_rows(
    groups: list[RolloutGroup], advantages_P_G_K: AdvantagesByTurn, config: LearnerConfig
) -> list[list[BatchRow]]:
    """Return every branch of the step, by group.

    A token has the advantage of its turn, in whichever branch of the episode it is. Weights derive from counts
    over the whole step, before groups without signal are dropped. Episodes that `mask_truncated` excludes do not
    count, except for dr_grpo, which divides by a constant.
    """
    is_constant = config.loss.mean_over == "dr_grpo"
    kept = [
        branches if is_constant or not is_masked(branches, config) else []
        for group in groups
        for branches in group.branches_G
    ]
    num_tokens = sum(branch.num_sampled for branches in kept for branch in branches)
    num_episodes = sum(bool(branches) for branches in kept)
    episodes = count()
    rows_P_G: list[list[BatchRow]] = []
    for number, (group, advantages_G_K) in enumerate(zip(groups, advantages_P_G_K, strict=True)):
        rows_P_G.append([])
        for branches, advantages_K in zip(group.branches_G, advantages_G_K, strict=True):
            episode = next(episodes)
            weight = row_weight(
                config.loss.mean_over,
                row_tokens=sum(branch.num_sampled for branch in kept[episode]),
                num_tokens=max(num_tokens, 1),
                num_rows=max(num_episodes, 1),
                max_tokens=config.sampling.max_tokens,
            )
            for branch in branches:
                row = BatchRow(
                    prompt_token_ids=group.prompt_of(branch),
                    branch=branch,
                    group=number,
                    episode=episode,
                    advantage=_by_token(advantages_K, branch),
                    weight=weight,
                    entered_version=group.entered_version,
                    prompt_experts=group.prompt_experts_of(branch) if config.routing_replay else None,
                )
                rows_P_G[-1].append(row)
    return rows_P_G


def trained_rows(
    groups: list[RolloutGroup], advantages_P_G_K: AdvantagesByTurn, config: LearnerConfig
) -> list[BatchRow]:
    """Return the branches that carry the loss.

    These are the branches of groups with signal. With a KL or an entropy term in the loss, which needs no
    signal, or the KL in the advantage, they are the branches of all groups. With `mask_truncated`, only those of
    finished episodes remain.
    """
    episodes = [branches for group in groups for branches in group.branches_G]
    needs_no_signal = config.loss.has_entropy_bonus or (config.kl.is_on and config.kl.place != "reward")
    return [
        row
        for rows_G, advantages_G_K in zip(step_rows(groups, advantages_P_G_K, config), advantages_P_G_K, strict=True)
        if needs_no_signal or any(map(any, advantages_G_K))
        for row in rows_G
        if not is_masked(episodes[row.episode], config)
    ]


def _by_token(advantages_K: list[float], branch: TokenSequence) -> float | np.ndarray:
    """Return the advantage of each token of a branch, or the one that all turns share."""
    if len(set(advantages_K)) == 1:
        return advantages_K[0]
    turn_T = branch.turn_T
    return np.where(turn_T == NOT_SAMPLED, 0.0, np.take(advantages_K, turn_T.clip(min=0)))


def is_masked(branches: list[TokenSequence], config: LearnerConfig) -> bool:
    """Return whether the loss excludes an episode because it was truncated, which ends its last branch."""
    return config.loss.mask_truncated and branches[-1].finish_reason == "length"


def micro_batch(rows: list[BatchRow], device: torch.device) -> MicroBatch:
    """Pack rows into a micro-batch; without rows, return one masked token.

    Adjacent rows of one group share the computation of their common prompt prefix.
    """
    is_trained = bool(rows)
    rows = rows or [_masked_row()]
    shape_BT = (len(rows), max(len(row.branch.token_ids) for row in rows))
    mask_BT = np.zeros(shape_BT, bool)
    behavior_logprobs_BT = np.zeros(shape_BT, np.float32)
    versions_BT = np.full(shape_BT, UNKNOWN_VERSION, np.int64)
    advantages_BT = np.zeros(shape_BT, np.float32)
    for b, row in enumerate(rows):
        branch, end = row.branch, len(row.branch.token_ids)
        # Exclude tokens whose logprob is NaN or inf, which an engine near a collapse returns.
        mask_BT[b, :end] = is_trained & branch.is_sampled_T & np.isfinite(branch.behavior_logprobs)
        behavior_logprobs_BT[b, :end] = branch.behavior_logprobs
        versions_BT[b, :end] = branch.versions_T
        advantages_BT[b, :end] = row.advantage
    references = [row.branch.reference_logprobs for row in rows if row.branch.reference_logprobs is not None]
    reference_logprobs_BT = np.zeros(shape_BT, np.float32)
    for b, reference_T in enumerate(references):
        reference_logprobs_BT[b, : len(reference_T)] = reference_T
    groups = [list(rows_G) for _, rows_G in groupby(rows, key=lambda row: row.group)]

    def on_device(values: object, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype)).to(device)

    experts_B = [row.experts for row in rows]
    num_unreplayed = [
        max(0, row.num_before_last_sampled - (0 if experts is None else len(experts)))
        for row, experts in zip(rows, experts_B, strict=True)
    ]
    pack = pack_trees([[(row.prompt_token_ids, [row.branch.token_ids]) for row in rows_G] for rows_G in groups], device)
    return MicroBatch(
        pack=pack,
        routing=lay_out(pack, experts_B),
        num_unreplayed=sum(num_unreplayed) if is_trained else 0,
        mask_BT=on_device(mask_BT, bool),
        behavior_logprobs_BT=on_device(behavior_logprobs_BT, np.float32),
        versions_BT=on_device(versions_BT, np.int64),
        entered_versions_B=on_device([row.entered_version for row in rows], np.int64),
        episodes_B=on_device([row.episode for row in rows], np.int64),
        advantages_BT=on_device(advantages_BT, np.float32),
        weights_B=on_device([row.weight for row in rows], np.float32),
        reference_logprobs_BT=on_device(reference_logprobs_BT, np.float32) if len(references) == len(rows) else None,
    )


def _masked_row() -> BatchRow:
    branch = TokenSequence(
        token_ids=np.zeros(1, np.int32),
        behavior_logprobs=np.zeros(1, np.float32),
        versions=[(0, 1)],
        finish_reason="stop",
    )
    return BatchRow(
        prompt_token_ids=np.zeros(1, np.int32),
        branch=branch,
        group=0,
        episode=0,
        advantage=0.0,
        weight=0.0,
        entered_version=UNKNOWN_VERSION,
    )


def row_weight(
    normalization: Normalization, *, row_tokens: int, num_tokens: int, num_rows: int, max_tokens: int
) -> float:
    """Return the weight of each sampled token of an episode.

    Counts are over the whole step and all ranks.

        token:    1 / num_tokens, equal for every token                      (DAPO, arXiv 2503.14476)
        sequence: 1 / (num_rows · row_tokens), equal for every episode       (GRPO, arXiv 2402.03300)
        sequence_sum: 1 / num_rows, so that an episode counts by its length  (LUSPO, arXiv 2602.05261)
        dr_grpo:  1 / (num_rows · max_tokens), a constant                    (Dr. GRPO, arXiv 2503.20783)
    """
    match normalization:
        case "token":
            return 1 / num_tokens
        case "sequence":
            return 1 / (num_rows * max(row_tokens, 1))
        case "sequence_sum":
            return 1 / num_rows
        case "dr_grpo":
            return 1 / (num_rows * max_tokens)
