"""Rows to padded tensors and back: nothing is moved, dropped or trained twice."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.config import LearnerConfig
from learner.rollouts.scored_group import ScoredGroup
from learner.training.batch import Row, micro_batches, trained_rows
from protocol.messages import Completion

CPU = torch.device("cpu")


def learner_config(**settings: object) -> LearnerConfig:
    needed = {"data": {"task": "reverse"}, "reward": {"functions": ["exact_match"]}, "steps": 1}
    return msgspec.convert(needed | settings, LearnerConfig)


def make_completion(token_ids: list[int], versions: list[tuple[int, int]] | None = None) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        behaviour_logprobs=-np.array(token_ids, np.float32) / 100,
        versions=versions or [(3, len(token_ids))],
        finish_reason="stop",
    )


def make_row(prompt: list[int], completion: Completion, advantage: float) -> Row:
    return Row(
        prompt_token_ids=np.array(prompt, np.int32),
        completion=completion,
        place=0,
        advantage=advantage,
        weight=2 * advantage,
        entered_version=3,
    )


def make_group(slot: int = 0) -> ScoredGroup:
    return ScoredGroup(
        group_id=f"{slot}.0",
        slot=slot,
        prompt_token_ids=np.array([1, 2], np.int32),
        completions=[make_completion([10 + g, 20 + g]) for g in range(2)],
        rewards_G=[0.0, 1.0],
        entered_version=3,
        rewards_by_function={},
    )


def test_index_t_belongs_to_token_t_plus_one() -> None:
    row = make_row([5, 6, 7], make_completion([8, 9], [(1, 1), (2, 1)]), 0.5)
    short = make_row([4], make_completion([3]), -0.5)
    (batch,) = micro_batches([short, row], 100, CPU)
    assert batch.token_ids_BS.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert batch.attention_mask_BS.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.mask_BT.tolist() == [[False, False, True, True], [True, False, False, False]]
    assert batch.versions_BT.tolist() == [[-1, -1, 1, 2], [3, -1, -1, -1]]
    torch.testing.assert_close(batch.behaviour_logprobs_BT[0], torch.tensor([0.0, 0.0, -0.08, -0.09]))
    assert batch.advantages_B.tolist() == [0.5, -0.5] and batch.weights_B.tolist() == [1.0, -1.0]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=20), st.integers(1, 80))
def test_every_row_is_in_exactly_one_micro_batch_within_the_budget(lengths: list[tuple[int, int]], budget: int) -> None:
    rows = [make_row([1] * p, make_completion([2 + i] * c), float(i)) for i, (p, c) in enumerate(lengths)]
    batches = list(micro_batches(rows, budget, CPU))
    seen = sorted(advantage for batch in batches for advantage in batch.advantages_B.tolist())
    assert seen == [float(i) for i in range(len(rows))]
    for batch in batches:
        assert batch.token_ids_BS.numel() <= budget or len(batch.token_ids_BS) == 1
    assert sum(int(batch.mask_BT.sum()) for batch in batches) == sum(c for _, c in lengths)


def test_groups_without_signal_are_not_trained_on_but_counted_in_the_weights() -> None:
    groups = [make_group(), make_group(slot=1)]  # 4 completions of 2 tokens
    for normalization, weight in (("token", 1 / 8), ("sequence", 1 / (4 * 2)), ("dr_grpo", 1 / (4 * 10))):
        config = learner_config(loss={"normalization": normalization}, sampling={"max_tokens": 10})
        rows = trained_rows(groups, [[0.0, 0.0], [1.0, -1.0]], config)
        assert [row.advantage for row in rows] == [1.0, -1.0]
        assert [row.weight for row in rows] == [weight, weight] and [row.place for row in rows] == [2, 3]


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ({}, [1 / 4, 1 / 4]),
        ({"objective": "gspo"}, [1 / (2 * 1), 1 / (2 * 3)]),
        ({"objective": "gspo", "normalization": "token"}, [1 / 4, 1 / 4]),
        ({"objective": "cispo", "normalization": "sequence"}, [1 / (2 * 1), 1 / (2 * 3)]),
    ],
)
def test_gspo_weighs_completions_alike_and_the_others_tokens_unless_they_are_told_otherwise(
    loss: dict[str, str], weights: list[float]
) -> None:
    group = msgspec.structs.replace(make_group(), completions=[make_completion([5]), make_completion([5, 6, 7])])
    rows = trained_rows([group], [[1.0, -1.0]], learner_config(loss=loss))
    assert [row.weight for row in rows] == pytest.approx(weights)


def test_truncated_completions_can_be_left_out_and_still_count_in_the_weights() -> None:
    group = make_group()
    truncated = msgspec.structs.replace(group.completions[0], finish_reason="length")
    group = msgspec.structs.replace(group, completions=[truncated, group.completions[1]])
    for mask_truncated, advantages in ((False, [-1.0, 1.0]), (True, [1.0])):
        config = learner_config(loss={"mask_truncated": mask_truncated})
        rows = trained_rows([group], [[-1.0, 1.0]], config)
        assert [row.advantage for row in rows] == advantages and {row.weight for row in rows} == {1 / 4}


def test_without_rows_there_is_one_that_is_masked_out() -> None:
    (batch,) = micro_batches([], 100, CPU)
    assert batch.token_ids_BS.shape == (1, 2) and not batch.mask_BT.any()
