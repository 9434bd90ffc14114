"""Stored behaviour logprobs and a clip make stale samples worth training on: without a ratio the same run learns nothing."""

import pytest

from tests.bench.cell import LARGE_STEPS, Cell
from tests.bench.trial import run_trial

NUM_STEPS = 200
"""Best exact match by then, seed 0: clipped 0.36, uncorrected 0.01."""


@pytest.mark.slow
@pytest.mark.timeout(900)  # four minutes on a loaded machine
def test_at_staleness_8_the_clipped_ratio_learns_to_sort_and_no_correction_does_not() -> None:
    cells = [Cell(task=LARGE_STEPS, algorithm=algorithm, max_staleness=8) for algorithm in ("grpo", "uncorrected")]
    clipped, uncorrected = (run_trial(cell, last_step=NUM_STEPS) for cell in cells)
    assert clipped.best >= 0.2, clipped.curve
    assert uncorrected.best <= clipped.best / 5, (clipped.best, uncorrected.curve)
