"""The step benchmark at a small size: both sides do the same work, and its oracle notices a difference."""

from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from learner.training.policy_trainer import PolicyTrainer
from tests.bench import step
from tests.bench.live_memory import LiveBytes
from tests.bench.step_model import SMALL, apart, load_trainer, make_model, make_rows

pytestmark = pytest.mark.system

TINY = SMALL | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


@pytest.fixture
def trainer(tmp_path: Path):
    AcceleratorState._reset_state(reset_partial_state=True)
    make_model(TINY, tmp_path)
    yield load_trainer(tmp_path, micro_batch_tokens=1000)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_both_sides_of_each_comparison_have_one_loss_and_one_gradient(trainer: PolicyTrainer) -> None:
    found = step.against_dense(trainer, 1, num_rows=3)
    assert found["oracle"]["loss"] < 1e-5 and found["oracle"]["gradient"] < 1e-5
    assert 0 < found["useful_over_bare"] < 10


def test_the_oracle_notices_different_rows(trainer: PolicyTrainer) -> None:
    rows = make_rows(2, 2, 5, 4, 128)
    found = step.differences(
        trainer, lambda: step.our_pass(trainer, rows), lambda: step.our_pass(trainer, rows[:2] + rows[1:2] * 2)
    )
    assert found["loss"] > 1e-4 and found["gradient"] > 0.1


def test_a_shared_prompt_is_computed_once(trainer: PolicyTrainer) -> None:
    rows = make_rows(3, 4, 50, 10, 128)
    assert step.num_computed(trainer, rows) == 3 * (50 + 4 * 9)
    assert step.num_computed(trainer, apart(rows)) == 3 * 4 * (50 + 9)


def test_the_common_prefix_of_branches_is_computed_once(trainer: PolicyTrainer) -> None:
    rows = make_rows(2, 3, 50, 10, 128, num_branches=4, num_said=40)
    assert [len(row.prompt_token_ids) for row in rows[:5]] == [50, 90, 130, 170, 50]
    assert [row.episode for row in rows] == [place for place in range(6) for _ in range(4)]
    assert step.num_computed(trainer, rows) == 2 * (50 + 3 * (3 * 40 + 4 * 9))
    assert step.num_computed(trainer, apart(rows)) == 6 * (50 + 90 + 130 + 170 + 4 * 9)


def test_a_speed_is_the_median_of_turns_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 9, 9, 18, 20, 21, 30, 33, 40, 45, 50, 54, 60, 62, 70, 71])
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(clock))
    turns: list[str] = []
    seconds = step.alternated({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, 3)
    assert "".join(turns) == "abababab" and seconds == {"a": 2, "b": 3}


def test_live_bytes_at_the_peak_are_counted_exactly() -> None:
    before = torch.ones(1000)
    with LiveBytes() as live:
        one = before + 1  # 4,000 bytes
        two = one * 2  # 8,000
        del one
        two.add_(1).view(10, 100).sum()  # in-place operations and views: nothing; a scalar: 4
    assert (live.peak, live.now) == (8000, 4000)


def test_the_head_needs_little_more_than_a_tile() -> None:
    found = step.head_peak(16_384, num_rows=1024, hidden_size=8)
    assert 1 <= found["peak_over_chunk"] < 1.5 and found["whole_logits_mib"] == 64
