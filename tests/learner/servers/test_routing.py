"""Which server is asked next: no order of requests and answers leaves one idle while another has much to do."""

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
