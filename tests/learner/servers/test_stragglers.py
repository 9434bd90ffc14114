"""Who keeps a sync waiting: of ranks that all stand still, the one that the others wait for."""

import pytest

from learner.servers.stragglers import RankState, late_ranks

PATIENCE_S = 5.0
CHAIN = {1: 0, 2: 1, 3: 2, 4: 3}
WAITS = RankState(0.1)
"""For bytes: of a chain that stands still, every rank after the one that is late."""


def blocked(seconds: float) -> RankState:
    return RankState(0.1, blocked_s=seconds)


@pytest.mark.parametrize("is_chain", [True, False])
@pytest.mark.parametrize("late", [RankState(5.1), RankState(0.1, loading_s=5.1)], ids=["silent", "loading"])
def test_a_rank_that_says_nothing_or_loads_for_too_long_is_late(late: RankState, is_chain: bool) -> None:
    ranks = {1: blocked(6.0 * is_chain), 2: late, 3: WAITS, 4: WAITS}
    parents, at_learner = (CHAIN, {1: 5.5}) if is_chain else ({}, {})
    assert late_ranks(ranks, parents, at_learner, PATIENCE_S) == {2}


def test_all_that_are_silent_for_about_as_long_are_late() -> None:
    ranks = {1: WAITS, 2: RankState(6.0), 3: WAITS, 4: RankState(4.8)}
    assert late_ranks(ranks, CHAIN, {1: 0.0}, PATIENCE_S) == {2, 4}


@pytest.mark.parametrize("late", [1, 2, 3, 4])
def test_a_rank_that_takes_nothing_and_waits_for_nobody_is_late(late: int) -> None:
    """Before it, each rank has waited for less long than the one after it, whose memory took some more bytes."""
    ranks = {rank: blocked(5.1 + 0.3 * rank) if rank < late - 1 else WAITS for rank in CHAIN}
    if late > 1:
        ranks[late - 1] = blocked(8.0)
    assert late_ranks(ranks, CHAIN, {1: 5.1}, PATIENCE_S) == {late}


def test_each_branch_of_a_star_has_its_own() -> None:
    ranks = {1: WAITS, 2: blocked(6.0), 3: WAITS}
    assert late_ranks(ranks, {1: 0, 2: 0, 3: 2}, {1: 0.0, 2: 5.5}, PATIENCE_S) == {3}
    assert late_ranks(ranks, {1: 0, 2: 0, 3: 2}, {1: 5.5, 2: 5.5}, PATIENCE_S) == {1, 3}


def test_nobody_is_late_while_bytes_move_or_all_wait_for_the_learner() -> None:
    assert late_ranks(dict.fromkeys(CHAIN, blocked(4.9)), CHAIN, {1: 4.9}, PATIENCE_S) == set()
    assert late_ranks(dict.fromkeys(CHAIN, WAITS), CHAIN, {1: 0.0}, PATIENCE_S) == set()
    assert late_ranks(dict.fromkeys(CHAIN, WAITS), {}, {}, PATIENCE_S) == set()
