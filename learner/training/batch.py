"""Scored groups to the padded tensors of a forward pass. Between rollouts and the loss.

Suffixes: G completions of a group, B rows (completions), S tokens of a row (prompt + completion, padded right),
T = S - 1 predicted tokens: index t of a _BT tensor belongs to token t + 1 of its row.
"""

from collections.abc import Iterator
from itertools import count

import msgspec
import numpy as np
import torch

from learner.config import LearnerConfig
from learner.config.algorithm import Normalization
from learner.policy.model import Inputs
from learner.rollouts.scored_group import UNKNOWN_VERSION, ScoredGroup
from protocol.messages import Completion


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One completion with its prompt."""

    prompt_token_ids: np.ndarray
    completion: Completion
    place: int
    """Among all completions of the step."""
    advantage: float
    weight: float
    """Of each of its tokens in the loss of the step."""
    entered_version: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion.token_ids)


class MicroBatch(Inputs, frozen=True, kw_only=True, eq=False):
    """Tensors of one forward pass, on the learner's device."""

    mask_BT: torch.Tensor
    behaviour_logprobs_BT: torch.Tensor
    versions_BT: torch.Tensor
    entered_versions_B: torch.Tensor
    places_B: torch.Tensor
    advantages_B: torch.Tensor
    weights_B: torch.Tensor
    proximal_logprobs_BT: torch.Tensor | None = None
    reference_logprobs_BT: torch.Tensor | None = None
    policy_mask_BT: torch.Tensor | None = None
    """The last three: what the survey found, where the loss needs it."""


def step_rows(groups: list[ScoredGroup], advantages_P_G: list[list[float]], config: LearnerConfig) -> list[list[Row]]:
    """Every completion of the step, by group, weighed by the counts of all of them."""
    num_tokens = sum(group.num_tokens for group in groups)
    num_rows = sum(len(group.completions) for group in groups)
    places = count()
    rows_P_G: list[list[Row]] = []
    for group, advantages_G in zip(groups, advantages_P_G, strict=True):
        rows_P_G.append([])
        for completion, advantage in zip(group.completions, advantages_G, strict=True):
            weight = row_weight(
                config.loss.mean_over,
                row_tokens=len(completion.token_ids),
                num_tokens=num_tokens,
                num_rows=num_rows,
                max_tokens=config.sampling.max_tokens,
            )
            row = Row(
                prompt_token_ids=group.prompt_token_ids,
                completion=completion,
                place=next(places),
                advantage=advantage,
                weight=weight,
                entered_version=group.entered_version,
            )
            rows_P_G[-1].append(row)
    return rows_P_G


def trained_rows(groups: list[ScoredGroup], advantages_P_G: list[list[float]], config: LearnerConfig) -> list[Row]:
    """The completions that carry the loss: those of groups with signal, and of all groups if there is a KL or an entropy in
    the loss, which need no signal; with mask_truncated, only the finished ones.
    """
    needs_no_signal = config.loss.entropy_coef > 0 or (config.kl.is_on and config.kl.place == "loss")
    return [
        row
        for rows_G, advantages_G in zip(step_rows(groups, advantages_P_G, config), advantages_P_G, strict=True)
        if needs_no_signal or any(advantages_G)
        for row in rows_G
        if not (config.loss.mask_truncated and row.completion.finish_reason == "length")
    ]


def micro_batches(rows: list[Row], max_tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """Cut rows, longest first, into micro-batches of at most `max_tokens` padded tokens each (a longer row goes alone).

    Without rows comes one row that is masked out, so that every rank takes part in the backward pass.
    """
    rows = sorted(rows, key=lambda row: row.num_tokens, reverse=True)
    if not rows:
        yield _pad([_masked_row()], device, trained=False)
    start = 0
    while start < len(rows):
        count = max(1, max_tokens // rows[start].num_tokens)
        yield _pad(rows[start : start + count], device, trained=True)
        start += count


def _masked_row() -> Row:
    completion = Completion(
        token_ids=np.zeros(1, np.int32), behaviour_logprobs=np.zeros(1, np.float32), versions=[(0, 1)], finish_reason="stop"
    )  # fmt: skip
    return Row(
        prompt_token_ids=np.zeros(1, np.int32),
        completion=completion,
        place=0,
        advantage=0.0,
        weight=0.0,
        entered_version=UNKNOWN_VERSION,
    )


def _pad(rows: list[Row], device: torch.device, *, trained: bool) -> MicroBatch:
    shape_BS = (len(rows), max(row.num_tokens for row in rows))
    shape_BT = (shape_BS[0], shape_BS[1] - 1)
    token_ids_BS = np.zeros(shape_BS, np.int64)
    attention_mask_BS = np.zeros(shape_BS, np.int64)
    mask_BT = np.zeros(shape_BT, bool)
    behaviour_logprobs_BT = np.zeros(shape_BT, np.float32)
    versions_BT = np.full(shape_BT, -1, np.int64)
    for b, row in enumerate(rows):
        first, end = len(row.prompt_token_ids), row.num_tokens
        token_ids_BS[b, :first] = row.prompt_token_ids
        token_ids_BS[b, first:end] = row.completion.token_ids
        attention_mask_BS[b, :end] = 1
        # A logprob that is no number (an engine near a collapse) takes its token out of everything.
        mask_BT[b, first - 1 : end - 1] = trained & np.isfinite(row.completion.behaviour_logprobs)
        behaviour_logprobs_BT[b, first - 1 : end - 1] = row.completion.behaviour_logprobs
        versions = row.completion.versions
        versions_BT[b, first - 1 : end - 1] = np.repeat([v for v, _ in versions], [count for _, count in versions])
    entered_versions_B = np.array([row.entered_version for row in rows], np.int64)
    places_B = np.array([row.place for row in rows], np.int64)
    advantages_B = np.array([row.advantage for row in rows], np.float32)
    weights_B = np.array([row.weight for row in rows], np.float32)
    return MicroBatch(
        token_ids_BS=torch.from_numpy(token_ids_BS).to(device),
        attention_mask_BS=torch.from_numpy(attention_mask_BS).to(device),
        mask_BT=torch.from_numpy(mask_BT).to(device),
        behaviour_logprobs_BT=torch.from_numpy(behaviour_logprobs_BT).to(device),
        versions_BT=torch.from_numpy(versions_BT).to(device),
        entered_versions_B=torch.from_numpy(entered_versions_B).to(device),
        places_B=torch.from_numpy(places_B).to(device),
        advantages_B=torch.from_numpy(advantages_B).to(device),
        weights_B=torch.from_numpy(weights_B).to(device),
    )


def row_weight(
    normalization: Normalization, *, row_tokens: int, num_tokens: int, num_rows: int, max_tokens: int
) -> float:
    """The weight of each token of a row; counts are over the whole step, all ranks, before anything is masked.

    token:    1 / num_tokens, every token alike                          (DAPO, arXiv 2503.14476)
    sequence: 1 / (num_rows · row_tokens), every completion alike        (GRPO, arXiv 2402.03300)
    dr_grpo:  1 / (num_rows · max_tokens), a constant                    (Dr. GRPO, arXiv 2503.20783)
    """
    match normalization:
        case "token":
            return 1 / num_tokens
        case "sequence":
            return 1 / (num_rows * max(row_tokens, 1))
        case "dr_grpo":
            return 1 / (num_rows * max_tokens)
