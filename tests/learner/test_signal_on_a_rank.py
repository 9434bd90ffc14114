"""A signal that reaches only a rank other than 0, as the eviction of a node does."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import learner.train
from learner.storage.checkpoint import complete_checkpoints
from protocol.config import to_toml
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.model_engine import tiny_server
from tests.learner.ranks import Place, places_of
from tests.learner.runs import make_run, metrics_of

STEPS, LAST_STEP = 6, 2


def enter(place: Place) -> None:
    """Take a place among the ranks. Rank 1 gets a signal in the last step."""
    place.enter()
    train_on = learner.train.train_on

    def with_signal(trainer: Any, groups: Any, version: int, timer: Any) -> dict[str, float]:
        if place.rank == 1 and version == LAST_STEP - 1:
            signal.raise_signal(signal.SIGTERM)
        return train_on(trainer, groups, version, timer)

    learner.train.train_on = with_signal


def test_a_signal_to_any_rank_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path) -> None:
    config, log = tmp_path / "run.toml", tmp_path / "log"
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=STEPS, checkpoint={"every_steps": STEPS})
        config.write_text(to_toml(run))
        ranks = [start_learner(("train", str(config)), log, log, partial(enter, place)) for place in places_of(2)]
        codes = [end_of(rank, log) for rank in ranks]
    assert len(metrics_of(run)) == LAST_STEP, log.read_text()
    assert [path.name for path in complete_checkpoints(run.checkpoint_dir)] == [f"step-{LAST_STEP:06}"]
    assert codes == [0, 0] and "stopping after this step, with a checkpoint" in log.read_text()
