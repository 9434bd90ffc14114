"""The numbers of the clients benchmark, from artificial windows."""

import pytest

from tests.bench.clients import Window, compare, parse_options

pytestmark = pytest.mark.system


def test_the_share_is_the_median_of_the_repetitions_and_the_answer_the_slowest_of_all() -> None:
    alone = [Window(100.0, 10.0, []), Window(200.0, 10.0, []), Window(50.0, 10.0, [])]
    beside = [Window(98.0, 9.7, [0.2, 3.0]), Window(190.0, 9.6, [0.1]), Window(10.0, 2.0, [0.3])]
    result = compare(alone, beside)
    assert result["learners_share"] == pytest.approx(0.95) and result["slowest_answer_s"] == 3.0
    assert result["learners_share_by_cpu"] == pytest.approx(0.96)
    assert (result["num_answers"], result["median_answer_s"]) == (4, 0.25)


def test_the_defaults_are_a_minute_and_three_repetitions() -> None:
    assert (parse_options([]).seconds, parse_options(["--repetitions", "1"]).repetitions) == (60.0, 1)
