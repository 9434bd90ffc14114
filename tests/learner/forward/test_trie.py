"""Shared prefixes of prompts: a tree of exact token ids, and its pack."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.forward.pack import MIN_SHARED, Group, TokenRun, common_length, pack, pack_trees, runs_of
from tests.learner.forward.plain_pass import CPU

CHUNKS = st.tuples(st.integers(1, 2), st.sampled_from([1, 5, MIN_SHARED - 1, MIN_SHARED, MIN_SHARED + 1, 70]))
PROMPTS = st.lists(st.lists(CHUNKS, min_size=1, max_size=4), min_size=1, max_size=8)


def prompt_of(chunks: list[tuple[int, int]]) -> np.ndarray:
    return np.repeat([token for token, _ in chunks], [count for _, count in chunks])


def walked(runs: list[TokenRun], before: tuple[TokenRun, ...] = ()) -> Iterator[tuple[TokenRun, ...]]:
    """Return each run, after its ancestors."""
    for run in runs:
        yield (*before, run)
        yield from walked(run.goes_on, (*before, run))


@given(PROMPTS)
def test_the_path_to_each_leaf_is_a_prompt_and_leaves_are_unique(chunks: list[list[tuple[int, int]]]) -> None:
    prompts = [prompt_of(one) for one in chunks]
    ended: list[int] = []
    for path in walked(runs_of(prompts)):
        run = path[-1]
        assert [one.start for one in path] == [0, *(one.end for one in path[:-1])]
        ended += run.ends
        for i in run.ends:
            tokens = np.concatenate([prompts[one.of][one.start : one.end] for one in path])
            assert tokens.tolist() == prompts[i].tolist()
    assert sorted(ended) == list(range(len(prompts)))


@given(PROMPTS)
def test_long_shared_prefixes_are_computed_once_and_short_ones_are_not_split(
    chunks: list[list[tuple[int, int]]],
) -> None:
    prompts = [prompt_of(one) for one in chunks]

    def check(siblings: list[TokenRun]) -> None:
        for number, run in enumerate(siblings):
            assert run.end - run.start >= MIN_SHARED or not run.goes_on
            for other in siblings[:number]:
                shared = min(common_length(prompts[run.of], prompts[other.of]), run.end, other.end)
                assert shared - run.start < MIN_SHARED, "these runs share a prefix"
            check(run.goes_on)

    check(runs_of(prompts))


def trees() -> list[list[Group]]:
    """Return an episode of three branches that continue each other's prompts, next to another of its group; and a plain
    group."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 16, size=count) for count in (40, 35, 50, 4, 6, 5, 3, 7, 12, 6)]
    first, second, third = ids[0], np.concatenate(ids[:2]), np.concatenate(ids[:3])
    elsewhere = np.concatenate([ids[0], ids[2]])
    episodes = [
        (first, [ids[3]]),
        (second, [ids[4]]),
        (third, [ids[5]]),
        (first, [ids[6], ids[7]]),
        (elsewhere, [ids[3]]),
    ]
    return [episodes, [(ids[8], [ids[9], ids[4]])]]


def test_a_pack_of_trees_has_shared_prefixes_once() -> None:
    """Values of such a pack are tested in test_tree_attention.py, and a whole step in training/test_step.py."""
    plain = pack([group for groups in trees() for group in groups], CPU)
    assert pack_trees(trees(), CPU).num_tokens == plain.num_tokens - (40 + 75 + 40 + 40)


@pytest.mark.parametrize("num_new", [MIN_SHARED // 2, MIN_SHARED])
def test_an_episode_may_have_more_nested_branches_than_python_allows_calls(num_new: int) -> None:
    """Such as of an agent that drops its thoughts: each prompt adds a few tokens, each completion is a branch."""
    longest = np.random.default_rng(0).integers(3, 16, size=50 + 400 * num_new)
    prompts = [longest[: 50 + num_new * turn] for turn in range(400)]
    packed = pack_trees([[(prompt, [np.arange(5)]) for prompt in prompts]], CPU)
    for prompt, path in zip(prompts, packed.paths_B, strict=True):
        rows = np.concatenate([segment.rows for segment in path])
        assert packed.token_ids_N[rows].tolist() == [*prompt, 0, 1, 2, 3]
        assert all(
            one.end <= other.start < one.continued_until >= other.continued_until for one, other in pairwise(path)
        )
