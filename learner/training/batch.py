"""Scored groups to rows, and rows to the tensors of a forward pass. Between rollouts and the loss; packing.py is in between, and
says which rows go together.

Suffixes: G completions of a group, B rows (completions), T tokens of the longest completion: index t of a _BT tensor belongs to
token t of its completion.
"""

from itertools import count, groupby

import msgspec
import numpy as np
import torch

from learner.config import LearnerConfig
from learner.config.algorithm import Normalization
from learner.forward.pack import Pack, pack
from learner.rollouts.scored_group import UNKNOWN_VERSION, ScoredGroup
from protocol.messages import Completion


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One completion with its prompt."""

    prompt_token_ids: np.ndarray
    completion: Completion
    group: int
    """Among the groups of the step; its rows have one prompt."""
    place: int
    """Among all completions of the step."""
    advantage: float
    weight: float
    """Of each of its tokens in the loss of the step."""
    entered_version: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion.token_ids)


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one forward pass and its loss read, on the learner's device."""

    pack: Pack
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
    for place, (group, advantages_G) in enumerate(zip(groups, advantages_P_G, strict=True)):
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
                group=place,
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


def micro_batch(rows: list[Row], device: torch.device) -> MicroBatch:
    """Rows of one group that stand together share their prompt. Without rows: one token that is masked out."""
    is_trained = bool(rows)
    rows = rows or [_masked_row()]
    shape_BT = (len(rows), max(len(row.completion.token_ids) for row in rows))
    mask_BT = np.zeros(shape_BT, bool)
    behaviour_logprobs_BT = np.zeros(shape_BT, np.float32)
    versions_BT = np.full(shape_BT, UNKNOWN_VERSION, np.int64)
    for b, row in enumerate(rows):
        completion, end = row.completion, len(row.completion.token_ids)
        # A logprob that is no number (an engine near a collapse) takes its token out of everything.
        mask_BT[b, :end] = is_trained & np.isfinite(completion.behaviour_logprobs)
        behaviour_logprobs_BT[b, :end] = completion.behaviour_logprobs
        versions_BT[b, :end] = np.repeat(
            [v for v, _ in completion.versions], [count for _, count in completion.versions]
        )
    groups = [list(rows_G) for _, rows_G in groupby(rows, key=lambda row: row.group)]

    def on_device(values: object, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype)).to(device)

    return MicroBatch(
        pack=pack(
            [(rows_G[0].prompt_token_ids, [row.completion.token_ids for row in rows_G]) for rows_G in groups], device
        ),
        mask_BT=on_device(mask_BT, bool),
        behaviour_logprobs_BT=on_device(behaviour_logprobs_BT, np.float32),
        versions_BT=on_device(versions_BT, np.int64),
        entered_versions_B=on_device([row.entered_version for row in rows], np.int64),
        places_B=on_device([row.place for row in rows], np.int64),
        advantages_B=on_device([row.advantage for row in rows], np.float32),
        weights_B=on_device([row.weight for row in rows], np.float32),
    )


def _masked_row() -> Row:
    completion = Completion(
        token_ids=np.zeros(1, np.int32), behaviour_logprobs=np.zeros(1, np.float32), versions=[(0, 1)], finish_reason="stop"
    )  # fmt: skip
    return Row(
        prompt_token_ids=np.zeros(1, np.int32),
        completion=completion,
        group=0,
        place=0,
        advantage=0.0,
        weight=0.0,
        entered_version=UNKNOWN_VERSION,
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
