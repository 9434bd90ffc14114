"""A killed and resumed run ends bit for bit like an uninterrupted one. Every death is a SIGKILL of a real process."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from learner.config import LearnerRun
from learner.storage import checkpoint
from learner.train import train
from tests.learner.model_engine import tiny_server
from tests.learner.mortal_learner import Death, LateDeath, Life, live
from tests.learner.ranks import Place, places_of
from tests.learner.storage.same_end import (
    assert_ends_alike,
    everything_in,
    losses_of,
    make_comparable_run,
)

SHORT = "after a step is taken and while a checkpoint is written"
CASES: dict[str, tuple[dict[str, Any], list[Death | LateDeath]]] = {
    SHORT: (
        {"reference": {"kind": "adaptive", "kl_threshold": 1e-9, "patience": 2, "reward_guard": False},
            "kl": {"coef": 0.1},
         "data": {"task": "reverse", "num_digits": 2, "num_prompts": 8},
         "sampling": {"group_size": 4, "max_tokens": 3, "seeded": True}, "dynamic_sampling": True,
         "curriculum": {"kind": "pass_rate", "easy_above": 0.3, "hard_below": 0.15, "easy_weight": 0.1}},
        [Death("consumed", 3), LateDeath("shards written", 2)],
    ),
    "in a checkpoint that shares the reference of the one before": (
        {"reference": {"kind": "fixed"}, "kl": {"coef": 0.1}, "checkpoint": {"every_steps": 1, "keep_last": 1},
            "steps": 6},
        [Death("generators saved", 2), Death("reference linked"), Death("copied"), Death("shards indexed"),
         Death("checkpoint named"), Death("best one named", 2), Death("old one unnamed", 2), Death("old one removed")],
    ),
    "an adapter": (
        {"reference": {"kind": "mixture", "every_steps": 2, "num_snapshots": 2}, "kl": {"coef": 0.1},
            "lora": {"rank": 4},
         "updates_per_batch": 2, "optimizer": {"learning_rate": 2e-3, "schedule": "linear", "warmup_steps": 2}},
        [Death("received", 4), Death("scored", 5), Death("logged", 3), Death("shards written"),
            Death("model exported")],
    ),
    "in checkpoints, each while the next step trains": (
        {"reference": {"kind": "ema", "every_steps": 1, "alpha": 0.3},
         "kl": {"coef": 0.1, "schedule": "target", "target": 1e-4, "horizon_steps": 3}, "steps": 6,
         "checkpoint": {"every_steps": 2, "keep_last": 1}},
        [LateDeath("shards written", 3), LateDeath("shards indexed", 2), LateDeath("model exported")],
    ),
}  # fmt: skip
"""Settings, and the death of each process but the last. After a checkpoint, a process counts from the next step."""


@pytest.mark.parametrize(
    ("learner", "deaths"),
    [pytest.param(*case, id=name, marks=[] if name == SHORT else pytest.mark.system) for name, case in CASES.items()],
)
def test_a_run_killed_repeatedly_ends_like_an_uninterrupted_run(
    tmp_path: Path, learner: dict[str, Any], deaths: list[Death | LateDeath]
) -> None:
    with tiny_server() as server:
        whole = make_comparable_run(tmp_path / "whole", server.endpoint, **learner)
        train(whole, resume=False)
    with tiny_server() as server:
        killed = make_comparable_run(tmp_path / "killed", server.endpoint, **learner)
        live(killed, *deaths)
    assert_ends_alike(killed, whole)
    assert any(abs(line["loss/policy"]) > 1e-3 for line in losses_of(whole))


class OldView(Place, frozen=True):
    """A rank whose file system does not list the newest checkpoint yet."""

    def enter(self) -> None:
        super().enter()
        complete = checkpoint.complete_checkpoints
        checkpoint.complete_checkpoints = lambda directory: complete(directory)[:-1]


def live_as_two(run: LearnerRun, death: Death | None, *, resume: bool) -> None:
    """Run two ranks that share the policy. torchrun would end the remaining rank when the other dies."""
    first, second = places_of(2)
    places = [first, OldView(**msgspec.structs.asdict(second))]
    lives = [Life(run, death if place.rank == 0 else None, resume=resume, place=place) for place in places]
    code = lives[0].end()
    if death is not None:
        lives[1].process.kill()
    # The second rank may notice the death of the first before it is killed.
    assert code == (0 if death is None else -9) and (lives[1].end() == 0) == (death is None), lives[0].log


@pytest.mark.system
def test_two_ranks_killed_after_a_step_and_in_a_checkpoint_end_like_uninterrupted_ranks(tmp_path: Path) -> None:
    learner = {
        "reference": {"kind": "every", "every_steps": 2, "reset_optimizer": True},
        "kl": {"coef": 0.1},
        "steps": 3,
        "sharding": "full",
    }
    runs = []
    for name, deaths in (("whole", []), ("killed", [Death("consumed", 3), Death("shards written")])):
        with tiny_server() as server:
            runs.append(make_comparable_run(tmp_path / name, server.endpoint, **learner))
            for i, death in enumerate([*deaths, None]):
                live_as_two(runs[-1], death, resume=i > 0)
    killed, whole = map(everything_in, reversed(runs))
    assert killed.keys() == whole.keys() and "random_states_1.pkl" in whole
    for name, tensor in whole.items():
        torch.testing.assert_close(killed[name], tensor, atol=1e-6, rtol=0, msg=name)
    for again, line in zip(*map(losses_of, reversed(runs)), strict=True):
        assert again == pytest.approx(line, abs=1e-6)
