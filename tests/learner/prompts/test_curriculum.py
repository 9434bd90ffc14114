"""The curriculum: how often each prompt is sampled, which depends only on seed, position and pass rates."""

import msgspec
import pytest

from learner.config import CurriculumConfig, DataConfig
from learner.policy.model import load_tokenizer
from learner.prompts.curriculum import Curriculum, PassRates
from learner.prompts.prompts import Prompts
from protocol.errors import DataError, RewardError
from protocol.model_files import resolve_model

NUM_PROMPTS = 6
EASY, HARD, NORMAL, UNSEEN = 0, 1, 2, 3


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    data = DataConfig(task="reverse", num_digits=2, num_prompts=NUM_PROMPTS)
    return Prompts(data, load_tokenizer(resolve_model("tiny:digits")), 0)


def curriculum(prompts: Prompts, next_position: int = 0, **config) -> Curriculum:
    made = Curriculum(CurriculumConfig(kind="pass_rate", **config), "right", prompts, 7, next_position)
    for slot, (prompt_id, rewards) in enumerate([(EASY, [1.0, 1.0]), (HARD, [0.0, 0.0]), (NORMAL, [0.0, 1.0])]):
        made.record(slot, prompt_id, {"right": rewards, "other": [5.0, 5.0]})
    made.count(3)
    return made


def rows_of(prompts: Prompts, made: Curriculum, num_slots: int) -> list[int]:
    return [prompts.row_at(made.ask()) for _ in range(num_slots)]


def test_without_a_curriculum_a_slot_uses_the_prompt_at_its_position(prompts: Prompts) -> None:
    made = Curriculum(CurriculumConfig(), "right", prompts, 7, 0)
    made.record(0, 1, {"right": [9.0, 9.0]})
    made.count(1)
    assert [made.ask() for _ in range(20)] == list(range(20)) and made.metrics(20) == {}


def test_easy_and_hard_prompts_are_sampled_in_a_share_of_epochs_and_others_in_every_epoch(prompts: Prompts) -> None:
    made = curriculum(prompts, easy_weight=0.1, hard_weight=0.5)
    rows = rows_of(prompts, made, 4000)
    num_epochs = made.next_position / NUM_PROMPTS
    share = {row: rows.count(row) / num_epochs for row in range(NUM_PROMPTS)}
    assert share[EASY] == pytest.approx(0.1, abs=0.03) and share[HARD] == pytest.approx(0.5, abs=0.05)
    assert all(share[row] == pytest.approx(1, abs=0.01) for row in (NORMAL, UNSEEN, 4, 5))
    skipped = made.next_position - 4000
    assert made.metrics(4000) == {"curriculum/skipped": skipped, "curriculum/easy": 1, "curriculum/hard": 1}


def test_rewards_that_are_sums_may_round_beyond_the_range(prompts: Prompts) -> None:
    made = curriculum(prompts)
    made.record(3, UNSEEN, {"right": [0.4 + 0.2 + 0.3 + 0.1]})
    made.record(4, 4, {"right": [1 - 0.9 - 0.1]})
    made.count(5)
    kept = made.pass_rates(5)
    assert kept is not None and (kept.by_prompt[UNSEEN], kept.by_prompt[4]) == (1, 0)


def test_the_sampled_prompt_depends_only_on_position_and_pass_rates(prompts: Prompts) -> None:
    whole = curriculum(prompts)
    positions = [whole.ask() for _ in range(200)]
    resumed = curriculum(prompts, next_position=positions[99] + 1)
    assert [resumed.ask() for _ in range(100)] == positions[100:]


def test_prompts_at_or_beyond_a_gate_are_not_sampled_again(prompts: Prompts) -> None:
    rows = rows_of(prompts, curriculum(prompts, drop_above=1.0, drop_below=0.0), 500)
    assert {EASY, HARD}.isdisjoint(rows) and {NORMAL, UNSEEN, 4, 5} == set(rows)


def test_an_epoch_without_allowed_prompts_ends_the_run_with_a_reason(prompts: Prompts) -> None:
    made = curriculum(prompts, drop_above=0.8, drop_below=0.2, decay=0.0)
    for slot, prompt_id in enumerate(range(NUM_PROMPTS), start=3):
        made.record(slot, prompt_id, {"right": [float(prompt_id % 2)]})
    made.count(3 + NUM_PROMPTS)
    with pytest.raises(DataError, match="skipped a whole data epoch: of 6 prompts, 3 are too easy and 3 too hard"):
        made.ask()


def test_skipping_epochs_by_chance_does_not_end_the_run(prompts: Prompts) -> None:
    made = curriculum(prompts, easy_weight=0.01)
    for slot, prompt_id in enumerate(range(NUM_PROMPTS), start=3):
        made.record(slot, prompt_id, {"right": [1.0]})
        made.record(slot + NUM_PROMPTS, prompt_id, {"right": [1.0]})
        made.record(slot + 2 * NUM_PROMPTS, prompt_id, {"right": [1.0]})
    made.count(100)
    positions = [made.ask() for _ in range(20)]
    assert positions[-1] > 20 * NUM_PROMPTS, "whole epochs passed without a prompt"


def test_pass_rates_are_moving_averages_in_slot_order_for_any_scoring_order(prompts: Prompts) -> None:
    made = Curriculum(CurriculumConfig(kind="pass_rate", decay=0.75), "right", prompts, 7, 0)
    for slot, rewards in ((4, [0.0, None]), (0, [1.0, 0.5]), (2, [1.0, 1.0]), (9, [0.0]), (3, [None, None])):
        made.record(slot, 5, {"right": rewards})
    made.count(5)
    expected = 0.75 * (0.75 * 0.75 + 0.25 * 1.0) + 0.25 * 0.0
    assert made._pass_rates == {5: pytest.approx(expected)}
    made.count(10)
    assert made._pass_rates == {5: pytest.approx(0.75 * expected)}


def test_restored_pass_rates_continue_as_if_counted_from_the_first_slot(prompts: Prompts) -> None:
    whole, first = curriculum(prompts), curriculum(prompts)
    groups = {slot: (slot % NUM_PROMPTS, {"right": [slot % 3 / 2]}) for slot in range(3, 40)}
    for made, slots in ((whole, range(3, 40)), (first, range(3, 20))):
        for slot in slots:
            made.record(slot, *groups[slot])
    whole.count(40)
    first.count(20)
    kept = msgspec.json.decode(msgspec.json.encode(first.pass_rates(20)), type=PassRates)
    resumed = Curriculum(CurriculumConfig(kind="pass_rate"), "right", prompts, 7, 0)
    assert resumed.restore(kept) == 20
    for slot in range(20, 40):
        resumed.record(slot, *groups[slot])
    resumed.count(40)
    assert resumed.pass_rates(40) == whole.pass_rates(40)
    assert Curriculum(CurriculumConfig(kind="pass_rate"), "another", prompts, 7, 0).restore(kept) == 0
    assert Curriculum(CurriculumConfig(), "right", prompts, 7, 0).pass_rates(40) is None


def test_a_function_whose_mean_is_not_a_pass_rate_is_an_error(prompts: Prompts) -> None:
    with pytest.raises(RewardError, match=r"function right has a mean of 1\.5 .*slot 8.*learner\.curriculum\.reward"):
        curriculum(prompts).record(8, 0, {"right": [1.0, 2.0]})
