"""A run that is killed and resumed ends bit for bit as one that was not: policy, optimizer, reference, books, losses.

At staleness 0 in float32 on one thread. Every death is a SIGKILL of a real process.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.config import LearnerRun
from learner.storage.checkpoint import find_checkpoint
from tests.learner.checkpoints import tensors_of, weights_of
from tests.learner.model_engine import tiny_server
from tests.learner.mortal_learner import Death, LateDeath, Life, live
from tests.learner.ranks import places_of
from tests.learner.runs import batches_of, make_run, metrics_of, seeded

LOSSES = ("loss/policy", "optim/lr", "optim/grad_norm", "reference/kl", "reference/kl_coef", "reference/version",
          "reward/mean", "policy/entropy", "batch/replaced_groups")  # fmt: skip


def a_run(path: Path, endpoint: str, **learner: Any) -> LearnerRun:
    path.mkdir()
    return make_run(path, endpoint, **({"checkpoint": {"every_steps": 2}, "steps": 5} | seeded() | learner))


def newest_checkpoint(run: LearnerRun) -> Path:
    checkpoint = find_checkpoint(Path(run.run_dir) / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def everything_in(run: LearnerRun) -> dict[str, torch.Tensor]:
    """In the newest checkpoint that is a tensor: policy, export, references, moments, generators."""
    checkpoint = newest_checkpoint(run)
    return tensors_of(checkpoint) | {
        f"{file.relative_to(checkpoint)}:{name}": tensor
        for file in checkpoint.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def losses_of(run: LearnerRun) -> list[dict[str, float]]:
    """The last line of every step: what a resume did again stands behind what was done before it."""
    last = {line["step"]: {key: line[key] for key in LOSSES if key in line} for line in metrics_of(run)}
    return [last[step] for step in sorted(last)]


def assert_ends_alike(run: LearnerRun, whole: LearnerRun) -> None:
    tensors, expected = everything_in(run), everything_in(whole)
    assert tensors.keys() == expected.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])] == []
    assert newest_checkpoint(run).name == newest_checkpoint(whole).name
    state, expected_state = (json.loads((newest_checkpoint(of) / "state.json").read_text()) for of in (run, whole))
    assert state == expected_state
    assert losses_of(run) == losses_of(whole)
    assert batches_of(run) == batches_of(whole)


CONSUMED = [Death("consumed", nth) for nth in (1, 2, 3, 2, 3)]
"""After the commit of each of the five steps in turn; each life after a checkpoint begins to count at the step behind it."""

SLOW = {
    "every, two updates, falling rate",
    "ema, controlled KL",
    "fixed, of which each checkpoint shares the file of the one before",
}
CASES = {
    "every, two updates, falling rate": (
        {"reference": {"kind": "every", "every_steps": 2, "reset_optimizer": True}, "kl": {"coef": 0.1},
         "updates_per_batch": 2, "optimizer": {"learning_rate": 2e-3, "schedule": "linear", "warmup_steps": 2}},
        CONSUMED,
    ),
    "every checkpoint but the first is cut short while the next step trains": (
        {"reference": {"kind": "every", "every_steps": 2}, "kl": {"coef": 0.1}, "steps": 6, "checkpoint": {"every_steps": 2, "keep_last": 1}},
        [LateDeath("shards written", 3), LateDeath("shards indexed", 2), LateDeath("model exported", 1)],
    ),
    "ema, controlled KL": (
        {"reference": {"kind": "ema", "every_steps": 1, "alpha": 0.3},
         "kl": {"coef": 0.1, "schedule": "target", "target": 1e-4, "horizon_steps": 3}, "checkpoint": {"every_steps": 2, "keep_last": 1, "keep_best": 0}},
        [Death("generators saved"), Death("copied"), Death("model exported"), Death("checkpoint named"), Death("old one removed"),
         Death("old one unnamed", 2)],
    ),
    "fixed, of which each checkpoint shares the file of the one before": (
        {"reference": {"kind": "fixed"}, "kl": {"coef": 0.1}, "checkpoint": {"every_steps": 1, "keep_last": 1}},
        [Death("generators saved", 2), Death("reference linked"), Death("checkpoint named"), Death("best one named", 2),
         Death("old one removed")],
    ),
    "adaptive, active sampling, curriculum": (
        {"reference": {"kind": "adaptive", "kl_threshold": 1e-9, "patience": 2, "reward_guard": False}, "kl": {"coef": 0.1},
         "data": {"task": "reverse", "num_digits": 2, "num_prompts": 8},
         "sampling": {"group_size": 4, "max_tokens": 3, "seeded": True}, "dynamic_sampling": True,
         "curriculum": {"kind": "pass_rate", "easy_above": 0.3, "hard_below": 0.15, "easy_weight": 0.1}},
        [Death("received", 4), Death("scored", 5), Death("logged", 3)],
    ),
    "mixture, adapter": (
        {"reference": {"kind": "mixture", "every_steps": 2, "num_snapshots": 2}, "kl": {"coef": 0.1},
         "lora": {"rank": 4}},
        [Death("logged", 3), Death("shards written"), Death("shards indexed", 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("learner", "deaths"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, case in CASES.items()],
)
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(
    tmp_path: Path, learner: dict[str, Any], deaths: list[Death | LateDeath]
) -> None:
    with tiny_server() as server:
        whole = a_run(tmp_path / "whole", server.endpoint, **learner)
        live(whole)
    with tiny_server() as server:
        killed = a_run(tmp_path / "killed", server.endpoint, **learner)
        live(killed, *deaths)
    assert_ends_alike(killed, whole)
    assert any(abs(line["loss/policy"]) > 1e-3 for line in losses_of(whole))


def live_as_two(run: LearnerRun, death: Death | None, *, resume: bool, is_sharded: bool) -> None:
    """Two ranks; torchrun would end the one that is left when the other dies."""
    places = places_of(2, is_sharded=is_sharded)
    lives = [Life(run, death if place.rank == 0 else None, resume=resume, place=place) for place in places]
    code = lives[0].end()
    if death is not None:
        lives[1].process.kill()
    # The other may have noticed that the first is gone before it was killed.
    assert code == (0 if death is None else -9) and (lives[1].end() == 0) == (death is None), lives[0].log


@pytest.mark.timeout(900)  # eight learners start one after the other, on a busy machine
@pytest.mark.parametrize(
    "is_sharded", [pytest.param(False, id="whole", marks=pytest.mark.slow), pytest.param(True, id="sharded")]
)
def test_two_ranks_killed_after_a_step_and_in_a_checkpoint_end_as_two_that_were_not(
    tmp_path: Path, is_sharded: bool
) -> None:
    learner = {"reference": {"kind": "every", "every_steps": 2}, "kl": {"coef": 0.1}, "steps": 3}
    in_checkpoint = "shards written" if is_sharded else "copied"
    runs = []
    for name, deaths in (("whole", []), ("killed", [Death("consumed", 3), Death(in_checkpoint)])):
        with tiny_server() as server:
            runs.append(a_run(tmp_path / name, server.endpoint, **learner))
            for i, death in enumerate([*deaths, None]):
                live_as_two(runs[-1], death, resume=i > 0, is_sharded=is_sharded)
            pushed = server.engine.weights
        saved = weights_of(newest_checkpoint(runs[-1]))
        assert saved.keys() == pushed.keys()
        assert [weight for weight, tensor in saved.items() if not torch.equal(tensor, pushed[weight])] == []
    killed, whole = map(everything_in, reversed(runs))
    assert killed.keys() == whole.keys() and "random_states_1.pkl" in whole
    for name, tensor in whole.items():
        torch.testing.assert_close(killed[name], tensor, atol=1e-6, rtol=0, msg=name)
    for again, line in zip(*map(losses_of, reversed(runs)), strict=True):
        assert again == pytest.approx(line, abs=1e-6)
