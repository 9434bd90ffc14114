"""Conversion of rows to tensors: no token is moved, dropped or trained twice."""

import msgspec
import numpy as np
import pytest
import torch

from learner.config import LearnerConfig
from learner.environments.episode import TokenSequence
from learner.training.batch import micro_batch, trained_rows
from tests.learner.training.batch_rows import make_completion, make_group, make_row

CPU = torch.device("cpu")


def learner_config(**settings: object) -> LearnerConfig:
    needed = {"data": {"task": "reverse"}, "reward": {"functions": ["exact_match"]}, "steps": 1}
    return msgspec.convert(needed | settings, LearnerConfig)


def test_index_t_belongs_to_token_t_of_the_completion() -> None:
    rows = [
        make_row([5, 6, 7], make_completion([8, 9], [(1, 1), (2, 1)]), 0.5, group=0),
        make_row([4], make_completion([3]), -0.5, group=1),
    ]
    batch = micro_batch(rows, CPU)
    assert batch.pack.targets_M.tolist() == [8, 9, 3]
    assert batch.mask_BT.tolist() == batch.pack.is_token_BT.tolist() == [[True, True], [True, False]]
    assert batch.versions_BT.tolist() == [[1, 2], [3, -1]]
    torch.testing.assert_close(batch.behavior_logprobs_BT, torch.tensor([[-0.08, -0.09], [-0.03, 0.0]]))
    assert batch.advantages_BT.tolist() == [[0.5, 0.5], [-0.5, 0.0]] and batch.weights_B.tolist() == [1.0, -1.0]


def test_a_token_has_the_advantage_of_its_turn_in_whichever_branch_it_is() -> None:
    """Two versions sampled turn 0, turn 1 follows it at once, and turn 3 began a branch before turn 2 was recorded."""
    first = TokenSequence(
        token_ids=np.arange(7, dtype=np.int32),
        behavior_logprobs=np.zeros(7, np.float32),
        versions=[(None, 1), (3, 1), (4, 1), (4, 2), (None, 1), (5, 1)],
        finish_reason="stop",
        turns=[(0, 2), (1, 2), (3, 1)],
    )
    second = msgspec.structs.replace(
        make_completion([8, 9]), turns=[(2, 2)], prompt_token_ids=np.array([1, 6], np.int32)
    )
    group = msgspec.structs.replace(
        make_group(), completions=[first, second, make_completion([5, 6])], num_branches_G=[2, 1]
    )
    rows = trained_rows([group], [[[0.5, -1.0, 2.0, 4.0], [-0.25]]], learner_config())
    batch = micro_batch(rows, CPU)
    assert batch.advantages_BT.tolist() == [[0, 0.5, 0.5, -1, -1, 0, 4], [2, 2, *[0] * 5], [-0.25, -0.25, *[0] * 5]]
    assert rows[2].advantage == -0.25 and batch.episodes_B.tolist() == [0, 0, 1]


def test_a_group_has_its_prompt_once_and_no_last_token_of_a_completion() -> None:
    rows = [make_row([5, 6], make_completion(ids), 1.0) for ids in ([8, 9, 10], [11])]
    rows.append(make_row([5, 6], make_completion([12, 13]), 1.0, group=1))
    batch = micro_batch(rows, CPU)
    assert batch.pack.token_ids_N.tolist() == [5, 6, 8, 9, 5, 6, 12]
    assert batch.pack.positions_N.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.pack.predicting_M.tolist() == [1, 2, 3, 1, 5, 6], "token 1 predicts the first of both completions"


def test_a_token_with_a_nan_logprob_is_masked() -> None:
    completion = make_completion([8, 9, 10])
    completion.behavior_logprobs[1] = np.nan
    assert micro_batch([make_row([5], completion, 1.0)], CPU).mask_BT.tolist() == [[True, False, True]]


def test_groups_without_signal_are_not_trained_but_count_in_the_weights() -> None:
    groups = [make_group(), make_group(slot=1)]  # 4 completions of 2 tokens
    for normalization, weight in (("token", 1 / 8), ("sequence", 1 / (4 * 2)), ("dr_grpo", 1 / (4 * 10))):
        config = learner_config(loss={"normalization": normalization}, sampling={"max_tokens": 10})
        rows = trained_rows(groups, [[[0.0], [0.0]], [[1.0], [-1.0]]], config)
        assert [row.advantage for row in rows] == [1.0, -1.0]
        assert [row.weight for row in rows] == [weight, weight] and [row.episode for row in rows] == [2, 3]


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ({}, [1 / 4, 1 / 4]),
        ({"objective": "gspo"}, [1 / (2 * 1), 1 / (2 * 3)]),
        ({"objective": "gspo", "normalization": "token"}, [1 / 4, 1 / 4]),
        ({"objective": "cispo", "normalization": "sequence"}, [1 / (2 * 1), 1 / (2 * 3)]),
    ],
)
def test_gspo_weighs_completions_equally_and_other_objectives_tokens_by_default(
    loss: dict[str, str], weights: list[float]
) -> None:
    group = msgspec.structs.replace(make_group(), completions=[make_completion([5]), make_completion([5, 6, 7])])
    rows = trained_rows([group], [[[1.0], [-1.0]]], learner_config(loss=loss))
    assert [row.weight for row in rows] == pytest.approx(weights)


@pytest.mark.parametrize("normalization", ["token", "sequence", "dr_grpo"])
@pytest.mark.parametrize("num_branches", [1, 2])
def test_masked_truncated_episodes_do_not_reduce_other_weights(num_branches: int, normalization: str) -> None:
    """The weights of all trained tokens sum to 1, independent of masks; those of dr_grpo are constant."""
    branches = [make_completion([5, 6, 7])] if num_branches == 1 else [make_completion([5, 6]), make_completion([7])]
    branches[-1] = msgspec.structs.replace(branches[-1], finish_reason="length")
    group = msgspec.structs.replace(
        make_group(),
        completions=[*branches, make_completion([5]), make_completion([5, 6])],
        num_branches_G=[num_branches, 1, 1],
        rewards_G=[0.0, 1.0, 2.0],
    )
    for mask_truncated, lengths in ((False, [*(len(branch.token_ids) for branch in branches), 1, 2]), (True, [1, 2])):
        config = learner_config(loss={"mask_truncated": mask_truncated, "normalization": normalization})
        rows = trained_rows([group], [[[-1.0], [0.0], [1.0]]], config)
        assert [len(row.branch.token_ids) for row in rows] == lengths
        total = sum(row.weight * len(row.branch.token_ids) for row in rows)
        constant = sum(lengths) / (3 * config.sampling.max_tokens)
        assert total == pytest.approx(constant if normalization == "dr_grpo" else 1.0)


def test_a_step_whose_completions_are_all_truncated_has_no_rows() -> None:
    group = make_group()
    truncated = [msgspec.structs.replace(one, finish_reason="length") for one in group.completions]
    group = msgspec.structs.replace(group, completions=truncated)
    assert trained_rows([group], [[[-1.0], [1.0]]], learner_config(loss={"mask_truncated": True})) == []


def test_a_batch_without_rows_has_one_masked_row() -> None:
    batch = micro_batch([], CPU)
    assert batch.mask_BT.shape == (1, 1) and not batch.mask_BT.any()
