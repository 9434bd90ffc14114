"""Stored behaviour logprobs and a clip make stale samples worth training on: without a ratio the same run hardly learns."""

from tests.bench.cell import Cell
from tests.bench.trial import run_trial

NUM_STEPS = 200
"""Exact match by then, seeds 0 to 3: clipped 0.31, 0.24, 0.31, 0.25; uncorrected 0.01, 0.05, 0.06, 0.03."""


def test_at_staleness_8_the_clipped_ratio_learns_to_sort_and_no_correction_does_not() -> None:
    clipped = run_trial(Cell(task="sort", algorithm="grpo", max_staleness=8), last_step=NUM_STEPS)
    uncorrected = run_trial(Cell(task="sort", algorithm="uncorrected", max_staleness=8), last_step=NUM_STEPS)
    assert clipped.cell.run().learner.optimizer.learning_rate == 2e-3
    assert clipped.best >= 0.15, clipped.curve
    assert uncorrected.best <= clipped.best / 3, (clipped.best, uncorrected.curve)
