"""Packing of groups into one row and back: every token in its place, every prompt once."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.forward.pack import Pack, pack

Groups = list[tuple[list[int], list[list[int]]]]
IDS = st.lists(st.integers(1, 1000), max_size=9)
GROUPS = st.lists(
    st.tuples(IDS.filter(bool), st.lists(IDS, min_size=1, max_size=4)), min_size=1, max_size=4
).filter(lambda groups: any(any(completions) for _, completions in groups))  # fmt: skip


def packed(groups: Groups) -> Pack:
    return pack([(np.array(prompt), [np.array(ids) for ids in lists]) for prompt, lists in groups], torch.device("cpu"))


@given(GROUPS)
def test_each_sequence_can_be_read_from_the_row(groups: Groups) -> None:
    batch = packed(groups)
    sequences = [(prompt, completion) for prompt, completions in groups for completion in completions]
    rows_BS, predicting_M = batch.sequences()
    token_ids_BS = batch.token_ids_N[rows_BS]
    predicted = iter(zip(predicting_M.tolist(), batch.predicting_M.tolist(), batch.targets_M.tolist(), strict=True))
    for b, (prompt, completion) in enumerate(sequences):
        whole = prompt + completion
        inputs = whole[:-1] if completion else whole
        assert token_ids_BS[b, : len(inputs)].tolist() == inputs
        assert batch.positions_N[rows_BS[b, : len(inputs)]].tolist() == list(range(len(inputs)))
        for t, token in enumerate(completion):
            at, row, target = next(predicted)
            assert divmod(at, rows_BS.shape[1]) == (b, len(prompt) + t - 1)
            assert row == rows_BS[b, len(prompt) + t - 1] and target == token
    assert next(predicted, None) is None
    assert batch.num_tokens == sum(len(p) + sum(max(0, len(c) - 1) for c in completions) for p, completions in groups)


def test_values_of_predicted_tokens_have_one_row_per_completion() -> None:
    batch = packed([([1, 2], [[3, 4, 5], [6]]), ([7], [[], [8, 9]])])
    values_M = torch.arange(1.0, 7.0, requires_grad=True)
    values_BT = batch.unpacked(values_M)
    assert values_BT.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0], [5, 6, 0]]
    values_BT[0, 2].backward()
    assert values_M.grad is not None and values_M.grad.tolist() == [0, 0, 1, 0, 0, 0]
