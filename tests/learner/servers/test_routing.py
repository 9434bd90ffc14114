"""Which server is asked next: no order of requests and answers leaves one idle while another has much to do."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from learner.servers.membership import Load, least_loaded

LOADS = st.lists(st.builds(Load, st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8)


@given(LOADS)
def test_it_is_one_that_owes_the_fewest_and_of_those_one_chosen_longest_ago(loads: list[Load]) -> None:
    index = least_loaded(loads)
    assert index is not None
    fewest = [load for load in loads if load.num_groups == min(load.num_groups for load in loads)]
    assert loads[index] in fewest and loads[index].chosen_at == min(load.chosen_at for load in fewest)


@given(LOADS, st.data())
def test_a_later_turn_stays_while_its_server_has_two_more_to_do_than_the_freest(
    loads: list[Load], data: st.DataObject
) -> None:
    stays_at = data.draw(st.integers(0, len(loads) - 1))
    fewest = min(load.num_groups for load in loads)
    may_stay = loads[stays_at].num_groups - fewest <= 2
    assert least_loaded(loads, stays_at) == (stays_at if may_stay else least_loaded(loads))


def test_nobody_is_chosen_of_nobody() -> None:
    assert least_loaded([]) is None


@given(num_servers=st.integers(1, 6), answers=st.lists(st.integers(0, 5), max_size=60))
def test_while_groups_are_asked_for_no_server_owes_two_more_than_another(num_servers: int, answers: list[int]) -> None:
    """Whoever answers; each answer is followed by a request, as in a run that is held back by its servers."""
    owed, chosen_at, num_choices = Counter[int](), Counter[int](), 0

    def ask() -> None:
        nonlocal num_choices
        index = least_loaded([Load(owed[server], chosen_at[server]) for server in range(num_servers)])
        assert index is not None
        num_choices += 1
        owed[index], chosen_at[index] = owed[index] + 1, num_choices

    for _ in range(3 * num_servers):
        ask()
    assert set(owed.values()) == {3}
    for server in answers:
        if owed[server % num_servers]:
            owed[server % num_servers] -= 1
            ask()
        assert max(owed.values()) - min(owed[server] for server in range(num_servers)) <= 1


def test_servers_that_answer_at_once_are_asked_in_turn() -> None:
    chosen_at = [0, 0, 0]
    asked = []
    for choice in range(1, 7):
        index = least_loaded([Load(0, at) for at in chosen_at])
        assert index is not None
        chosen_at[index] = choice
        asked.append(index)
    assert asked == [0, 1, 2, 0, 1, 2]
