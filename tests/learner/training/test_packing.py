"""Distribution of rows to ranks and micro-batches: every row once, within the budget, balanced, with few repeated
prompts."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.forward.attention import key_layout
from learner.training.batch import BatchRow, micro_batch
from learner.training.packing import Layout, num_tokens, pieces_of, share_out, split_into_micro_batches
from tests.learner.config.settings import ALWAYS, load
from tests.learner.training.batch_rows import Shapes, make_completion, make_row, rows_of

SHAPES = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 12), min_size=1, max_size=6)), min_size=1, max_size=8
)


def layout(max_tokens: int, *, is_packed: bool = True, pair_cost: float = 0.0, key_size: float = 0.0) -> Layout:
    return Layout(max_tokens=max_tokens, is_packed=is_packed, pair_cost=pair_cost, key_size=key_size)


def advantages_of(rows: list[BatchRow]) -> list[float]:
    return [row.advantage for row in rows]


@given(SHAPES, st.integers(1, 80), st.integers(1, 5), st.booleans())
def test_every_row_is_in_exactly_one_micro_batch_of_one_rank(
    shapes: Shapes, budget: int, num_ranks: int, is_packed: bool
) -> None:
    rows, how = rows_of(shapes), layout(budget, is_packed=is_packed)
    batches = [batch for pieces in share_out(rows, num_ranks, how) for batch in split_into_micro_batches(pieces, how)]
    assert sorted(value for batch in batches for value in advantages_of(batch)) == advantages_of(rows)
    for batch in batches:
        computed = sum(
            num_tokens([row for row in batch if row.group == group]) for group in {row.group for row in batch}
        )
        padded = len(batch) * max(row.num_tokens for row in batch)
        assert (computed if is_packed else padded) <= budget or len(batch) == 1


def test_a_group_that_fits_is_not_split_and_a_larger_one_has_the_fewest_splits() -> None:
    rows = rows_of([(10, [5, 5, 5, 5]), (3, [2])])
    assert [advantages_of(piece) for piece in pieces_of(rows, layout(30))] == [[0, 1, 2, 3], [4]]
    assert [advantages_of(piece) for piece in pieces_of(rows, layout(20))] == [[0, 1], [2, 3], [4]]
    assert [advantages_of(batch) for batch in split_into_micro_batches(pieces_of(rows, layout(25)), layout(25))] == [
        [0, 1, 2],
        [3, 4],
    ]


def test_passes_are_smaller_on_a_cpu_unless_a_number_is_set(tmp_path: Path) -> None:
    by_default, chosen = (load(tmp_path, ALWAYS | keys).learner for keys in ({}, {"micro_batch_tokens": 9000}))
    assert [by_default.tokens_per_pass(device) for device in ("cpu", "cuda")] == [4096, 16384]
    assert [chosen.tokens_per_pass(device) for device in ("cpu", "cuda")] == [9000, 9000]


def test_without_packing_a_row_costs_the_longest_row_of_its_micro_batch() -> None:
    how = layout(20, is_packed=False)
    batches = split_into_micro_batches(pieces_of(rows_of([(4, [6, 1]), (2, [8])]), how), how)
    assert [advantages_of(batch) for batch in batches] == [[0, 2], [1]]


@given(SHAPES, st.integers(40, 200), st.floats(0, 1))
def test_a_pass_counts_the_keys_that_its_attention_gathers(shapes: Shapes, budget: int, key_size: float) -> None:
    rows, how = rows_of(shapes), layout(budget, key_size=key_size)
    for batch in split_into_micro_batches(pieces_of(rows, how), how):
        pack = micro_batch(batch, torch.device("cpu")).pack
        num_keys = len(key_layout(pack).rows_L)
        assert pack.num_tokens + key_size * num_keys <= budget or len(batch) == 1
    # The estimate is exact but for the last token of a completion, which no pass has.
    piece = [row for row in rows if row.group == rows[0].group]
    pack = micro_batch(piece, torch.device("cpu")).pack
    num_keys, num_last = len(key_layout(pack).rows_L), len(piece)
    size = sum(layout(1, key_size=1.0).size(*pair) for pair in zip([None, *piece[:-1]], piece, strict=True))
    assert num_keys + pack.num_tokens <= size <= num_keys + pack.num_tokens + 2 * num_last + num_unused(piece)


def num_unused(piece: list[BatchRow]) -> int:
    """Keys that a completion of one token, of which nothing remains in the pack, does not gather."""
    return sum(len(row.prompt_token_ids) for row in piece if len(row.branch.token_ids) == 1)


def test_branches_of_a_group_count_only_their_unshared_tokens() -> None:
    prompts = [[1] * 40, [1] * 40 + [2] * 10, [1] * 40 + [2] * 10 + [3] * 40, [1] * 40]
    rows = [make_row(prompt, make_completion([4] * 5), float(i), 0) for i, prompt in enumerate(prompts)]
    assert num_tokens(rows) == 40 + 10 + 40 + 4 * 5
    assert [advantages_of(piece) for piece in pieces_of(rows, layout(110))] == [[0, 1, 2, 3]]
    assert [advantages_of(piece) for piece in pieces_of(rows, layout(105))] == [[0, 1, 2], [3]]
    pairs = 90 * 90 / 2 + sum(5 * (len(prompt) + 5 / 2) for prompt in prompts)
    assert layout(110, pair_cost=0.5).cost(rows) == num_tokens(rows) + 0.5 * pairs


def test_ranks_are_balanced_by_arithmetic_not_by_tokens_or_rows() -> None:
    """One sequence of 64 tokens has as many pairs as sixteen sequences of 16 tokens."""
    rows = rows_of([(1, [63]), *[(1, [15])] * 16])
    how = layout(1000, pair_cost=1.0)
    loads = sorted(sum(map(how.cost, pieces)) for pieces in share_out(rows, 2, how))
    assert loads[1] / loads[0] < 1.1
    by_rank = sorted(share_out(rows, 2, how), key=len)
    assert len(by_rank[0]) <= 4 and sum(row.num_tokens for row in by_rank[0][0]) == 64


def test_a_single_group_is_split_so_that_every_rank_has_work() -> None:
    shares = share_out(rows_of([(4, [8] * 16)]), 4, layout(1000))
    assert [sum(map(len, pieces)) for pieces in shares] == [4, 4, 4, 4]
